"""Checks that ranks agree: values, arguments of calls, descriptions of functions."""
