"""How leaves become segments of shards, and where a leaf's values come from."""
