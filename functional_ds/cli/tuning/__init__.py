"""Measures candidates: short runs in separate processes, and successive halving."""
