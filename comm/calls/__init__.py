"""A call of a collective: resolved arguments, its autograd node, and shards of uneven sizes."""
