"""Dry runs: what a step allocates, computes and sends, as events that predictions add up."""
