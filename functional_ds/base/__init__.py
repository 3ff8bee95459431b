"""Pytrees, marks on leaves, weighted sums, random keys, batches, devices, and private names of torch."""
