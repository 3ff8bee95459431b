"""Pytrees, marks on leaves, weighted sums, random keys, batches, files, and private names of torch."""
