"""Modules as pure functions, also those that have no memory yet."""
