"""The world that the current thread is in."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from functional_ds.comm.record.group import Group, Solo, World
from functional_ds.comm.table.errors import CommError

from .process import process_world

__all__ = ["enter", "exclusive_simulation", "simulated_world", "world"]


class _WorldOfThread(threading.local):
    """What is known of the current thread: the world of the simulated rank that it is; whether it waits for its ranks."""

    group: Group | None = None
    simulates: bool = False


_THREAD = _WorldOfThread()
_RUNNING = threading.Lock()  # random generators and warning filters are the process's, so one simulation runs at a time


def simulated_world() -> Group | None:
    """The world of the simulated rank that this thread is, or None.

    Raises:
        CommError: a simulation is running and this thread is not one of its ranks.
    """
    group = _THREAD.group
    if group is None and _RUNNING.locked() and not _THREAD.simulates:
        raise CommError(
            f"thread {threading.current_thread().name!r} asks for its world while a simulation runs, and is none of its ranks; "
            "a simulated rank is one thread: call collectives from there"
        )
    return group


@contextmanager
def enter(world: World, ranks: Sequence[int]) -> Iterator[None]:
    """Makes this thread the world's rank while the block runs; ``ranks`` are all ranks of the world."""
    outer = _THREAD.group
    _THREAD.group = Group(tuple(ranks), world.rank, "world", world)
    try:
        yield
    finally:
        _THREAD.group = outer


@contextmanager
def exclusive_simulation() -> Iterator[None]:
    """Waits until no other thread simulates. A simulated rank may simulate a world of its own."""
    if _THREAD.group is not None or _THREAD.simulates:
        yield
        return
    with _RUNNING:
        _THREAD.simulates = True
        try:
            yield
        finally:
            _THREAD.simulates = False


_SOLO = Group((0,), 0, "world", Solo())


def world() -> Group:
    """All ranks as a group: those of the simulation that this thread is in, else of torch's default process group, else one.

    >>> world().size
    1
    """
    return simulated_world() or process_world() or _SOLO
