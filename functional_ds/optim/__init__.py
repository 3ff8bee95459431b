"""Optimizers as pairs of pure functions on lists of tensors; param groups; per-parameter and per-matrix optimizers."""
