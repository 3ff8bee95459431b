"""Debugging: checked calls, exploration of interleavings, times and traces."""
