"""Modules traced and split into pipeline stages."""
