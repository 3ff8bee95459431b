"""Checkpoints of all formats as named tensors: reading and writing."""
