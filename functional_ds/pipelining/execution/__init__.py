"""The execution of a schedule: messages between stages, gathers, split backward passes and times."""
