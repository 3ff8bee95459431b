"""The current thread's world, and the recorder of its collectives while a step is traced."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from functional_ds.base.torch_private import detect_fake_mode, has_values
from functional_ds.base.tree import setting
from functional_ds.comm.record.call_recorder import CallRecorder
from functional_ds.comm.record.group import Group, Solo, World
from functional_ds.comm.table.errors import CommError

from .process import process_world


class _OfThread(threading.local):
    """State of the current thread.

    Attributes:
        group: the world, if the thread is a simulated rank.
        simulates: whether it waits for the ranks of a simulation.
        recorder: performs its collectives, or records them.
    """

    group: Group | None = None
    simulates: bool = False
    recorder: CallRecorder = CallRecorder()


_THREAD = _OfThread()
_RUNNING = threading.Lock()  # random generators and warning filters are global, so one simulation runs at a time


def simulated_world() -> Group | None:
    """The world of this thread's simulated rank, or None outside of simulations.

    Raises:
        CommError: a simulation is running, and this thread is not one of its ranks.
    """
    group = _THREAD.group
    if group is None and _RUNNING.locked() and not _THREAD.simulates:
        raise CommError(
            f"thread {threading.current_thread().name!r} asks for its world while a simulation runs, and is not one of its "
            "ranks; a simulated rank is one thread: call collectives from there"
        )
    return group


def enter(world: World, ranks: Sequence[int]) -> AbstractContextManager[None]:
    """Makes this thread the world's rank inside the block; ``ranks`` are all ranks of the world."""
    return setting(_THREAD, group=Group(tuple(ranks), world.rank, "world", world))


@contextmanager
def exclusive_simulation() -> Iterator[None]:
    """Waits until no other thread runs a simulation. Simulations can be nested."""
    if _THREAD.group is not None or _THREAD.simulates:
        yield
        return
    with _RUNNING, setting(_THREAD, simulates=True):
        yield


_SOLO = Group((0,), 0, "world", Solo())


def world() -> Group:
    """All ranks as a group: of the current simulation, else of torch's default process group, else this rank alone.

    >>> world().size
    1
    """
    return simulated_world() or process_world() or _SOLO


def recorder() -> CallRecorder:
    """What takes this thread's collectives: performs them, or records them."""
    return _THREAD.recorder


def recording(into: CallRecorder) -> AbstractContextManager[None]:
    """Records this thread's collectives inside the block."""
    return setting(_THREAD, recorder=into)


def runs_on_shapes(tensor: Tensor) -> bool:
    """Whether a tensor is on meta, or fake, so that checks of its values can be skipped.

    False for fake tensors while a step is traced into a graph: the graph runs on values later, so it must include the checks.
    """
    return not has_values(tensor) and (tensor.is_meta or not recorder().traces)


def is_trial() -> bool:
    """Whether this run is only for shapes and leaves nothing behind; not so when a step is traced into a graph."""
    return detect_fake_mode() is not None and not recorder().records
