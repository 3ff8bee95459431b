"""States as named global tensors: which elements of which leaf each shard holds."""
