"""Finding faults: calls compared while they run, interleavings explored, times and traces."""
