"""Stages as functions, their shapes, and how layers are divided among them."""
