"""Entries of a job file: records read from plain data, named calls, TOML, and errors that name the entry and its line."""
