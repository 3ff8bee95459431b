"""Checks declarations of variance by the values' bits, and by propagating them through a program's operations."""
