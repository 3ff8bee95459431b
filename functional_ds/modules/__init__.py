"""Modules as pure functions of their parameters, and deferred (meta-device) initialization."""
