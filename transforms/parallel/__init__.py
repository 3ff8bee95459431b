"""Tensor, sequence (context) and expert parallelism: which slices, positions and experts each rank has."""
