"""Dry runs: what a step allocates, computes and sends, as events from which costs are predicted."""
