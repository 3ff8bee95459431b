"""Optimizers: functions on lists of shards; by leaf, by param group, by matrix."""
