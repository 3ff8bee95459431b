"""Whole steps as graphs: traced, changed by passes, and run."""
