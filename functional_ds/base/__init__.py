"""Pytrees, marks on leaves, weighted sums, random keys and rows of a batch."""
