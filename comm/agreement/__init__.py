"""Checks that ranks agree on values, arguments and functions."""
