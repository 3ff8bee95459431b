"""Measurements of candidates: short runs in processes of their own, and successive halving."""
