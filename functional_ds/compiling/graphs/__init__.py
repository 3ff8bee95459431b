"""Whole steps as graphs: traced, changed by passes, priced and drawn."""
