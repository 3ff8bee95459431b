"""Schedules as data: actions, generators, dependencies, proofs."""
