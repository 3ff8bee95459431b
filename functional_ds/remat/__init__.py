"""Recomputation: what is saved, where it is kept, and what runs again."""
