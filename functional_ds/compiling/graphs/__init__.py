"""Whole steps as graphs: tracing, passes, cost model and plots."""
