"""Predicts what a step holds, sends and takes, from shapes: models by name, strategies, machines, and dry runs."""
