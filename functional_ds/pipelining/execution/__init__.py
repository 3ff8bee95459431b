"""Carrying a schedule out: messages, gathers, split backwards, times."""
