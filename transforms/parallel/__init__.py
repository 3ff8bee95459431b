"""Transforms of tensor, sequence and expert parallelism: which slices, positions and experts each rank has."""
