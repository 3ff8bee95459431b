"""Which simulated rank the current thread is."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from functional_ds.comm.record.errors import CommError
from functional_ds.comm.record.group import Group, Solo

from .process import process_world

__all__ = ["HERE", "only_simulation", "simulated_world", "world"]

HERE = threading.local()
_RUNNING = threading.Lock()  # generators and warning filters are the process's, so one simulation runs at a time


def simulated_world() -> Group | None:
    """The world of the simulated rank that this thread is, or None.

    Raises:
        CommError: a simulation runs, and this thread is none of its ranks.
    """
    group: Group | None = getattr(HERE, "group", None)
    if group is None and _RUNNING.locked() and not getattr(HERE, "simulates", False):
        raise CommError(
            f"thread {threading.current_thread().name!r} asks for its world while a simulation runs, and is none of its ranks; "
            "a simulated rank is one thread: call collectives from there"
        )
    return group


@contextmanager
def only_simulation() -> Iterator[None]:
    """Waits for another thread's simulation to end. A rank may simulate a world of its own."""
    if getattr(HERE, "group", None) is not None or getattr(HERE, "simulates", False):
        yield
        return
    with _RUNNING:
        HERE.simulates = True
        try:
            yield
        finally:
            HERE.simulates = False


_SOLO = Group((0,), 0, "world", Solo())


def world() -> Group:
    """The group of all ranks: of the simulation that this thread is in, else of torch's default process group, else of one.

    >>> world().size
    1
    """
    return simulated_world() or process_world() or _SOLO
