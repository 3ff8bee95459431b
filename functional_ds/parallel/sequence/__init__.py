"""Sequence parallelism of a model: attention over sequences that are cut among ranks, and functions applied in tiles."""
