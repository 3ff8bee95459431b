"""Crash-safe files, locks, reads of bounded size, and direct I/O."""
