"""Functions and losses applied tile by tile along the sequence, so that activations of one tile exist at a time."""
