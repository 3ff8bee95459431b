"""Optimizers as pairs of functions on lists of tensors; param groups; optimizers per parameter and per matrix."""
