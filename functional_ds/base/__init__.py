"""Pytrees, marks on leaves, weighted sums, random keys, batches, files, and the private names of torch that the library uses."""
