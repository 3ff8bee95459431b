"""Which simulated rank the current thread is."""

import threading

from .group import Group

__all__ = ["HERE", "simulated_world"]

HERE = threading.local()


def simulated_world() -> Group | None:
    """The world of the simulated rank that this thread is, or None."""
    return getattr(HERE, "group", None)
