"""Entries of a job's file: records read from plain data, calls by name, TOML, and errors that name the entry and its line."""
