"""Layouts: leaves grouped into FSDP units and flattened into shards; leaf maps; sources of deferred leaves."""
