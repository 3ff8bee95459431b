"""Traces modules and splits them into pipeline stages."""
