"""Runs schedules: messages between stages, gathers, split backward passes and timing."""
