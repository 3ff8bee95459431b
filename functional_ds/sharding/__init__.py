"""Layouts: how leaves are grouped into units and cut into shards; and the sources of deferred leaves."""
