"""What the current thread is in: its world, and what records its collectives, if a step is traced."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from functional_ds.base.torch_private import is_fake
from functional_ds.comm.record.call_recorder import CallRecorder
from functional_ds.comm.record.group import Group, Solo, World
from functional_ds.comm.table.errors import CommError

from .process import process_world

__all__ = [
    "current_recorder",
    "enter",
    "exclusive_simulation",
    "labelled",
    "recomputing",
    "recording",
    "runs_on_shapes",
    "simulated_world",
    "world",
]


class _OfThread(threading.local):
    """What is known of the current thread.

    Attributes:
        group: the world of the simulated rank that it is.
        simulates: whether it waits for the ranks of a simulation.
        recorder: what writes its collectives down.
    """

    group: Group | None = None
    simulates: bool = False
    recorder: CallRecorder | None = None


_THREAD = _OfThread()
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


def current_recorder() -> CallRecorder | None:
    """That of this thread; None where collectives are carried out."""
    return _THREAD.recorder


@contextmanager
def recording(recorder: CallRecorder) -> Iterator[None]:
    """Within the block this thread's collectives are the recorder's."""
    outer = current_recorder()
    _THREAD.recorder = recorder
    try:
        yield
    finally:
        _THREAD.recorder = outer


def labelled(name: str) -> AbstractContextManager[None]:
    """Within the block what this thread's collectives carry has a name, if they are recorded."""
    recorder = current_recorder()
    return nullcontext() if recorder is None else recorder.labelled(name)


def recomputing() -> AbstractContextManager[None]:
    """Within the block this thread computes again what a backward pass needs, which its graph shows, if there is one."""
    recorder = current_recorder()
    return nullcontext() if recorder is None else recorder.recomputing()


def runs_on_shapes(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a trial without values, whose numbers are unused.

    Not while a step is traced into a graph, which runs on values later: what depends on them there must be in the graph.
    """
    recorder = current_recorder()
    return tensor.is_meta or (is_fake(tensor) and (recorder is None or recorder.trial))
