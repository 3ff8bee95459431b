"""Differentiation through training steps, on one device and over data-parallel ranks."""
