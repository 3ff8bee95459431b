"""Modules as pure functions of their parameters, and modules that are built without memory."""
