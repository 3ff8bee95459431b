"""Sharded state dicts: states as named global tensors, with the elements of each leaf that each shard holds."""
