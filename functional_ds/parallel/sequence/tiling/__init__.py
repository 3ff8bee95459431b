"""Functions and losses applied tile by tile along the sequence, to keep the activations of only one tile."""
