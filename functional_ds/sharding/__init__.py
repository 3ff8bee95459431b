"""Sharding of params: FSDP-style units and flat shards, maps of leaves to shards, and deferred leaves."""
