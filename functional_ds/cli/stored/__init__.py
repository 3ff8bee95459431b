"""Checkpoints of all kinds as named tensors: what is in a path, and how its tensors are read and written."""
