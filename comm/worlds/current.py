"""The current thread's world, and the recorder of its collectives while a step is traced."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from torch import Tensor

from functional_ds.base.torch_private import detect_fake_mode, disable_dispatch_modes, has_values
from functional_ds.base.tree import setting
from functional_ds.comm.record.graph_notes import UnitGathering
from functional_ds.comm.record.group import Group, Solo, World
from functional_ds.comm.table.collective import Call, CallContext, Handle
from functional_ds.comm.table.errors import CommError

from .process import process_world


class CallRecorder:
    """What records a rank's collectives while its step is traced. This one records nothing: collectives are performed.

    Attributes:
        records: whether it takes the collectives, so that tensors have no values.
        traces: whether it records into a graph, which runs on values later.
    """

    records: ClassVar[bool] = False
    traces: ClassVar[bool] = False

    def start(
        self, call: Call, leaves: Sequence[Tensor], group: Group, here: CallContext, *, beside: bool, early: bool
    ) -> Handle:
        """Takes a call, if it records; its handle gives results without values."""
        raise NotImplementedError

    def eager(self, function: Callable[..., Tensor], xs: Sequence[Tensor]) -> Tensor:
        """Calls a function; a graph has it as one call, as its inner shapes depend on values."""
        return function(*xs)

    def labelled(self, name: str) -> AbstractContextManager[None]:
        """Labels the collectives inside the block, and the operations around them."""
        return nullcontext()

    def batch(self, world: World) -> AbstractContextManager[None]:
        """Makes the messages that are started inside the block one batch."""
        return world.batch()

    def recomputing(self) -> AbstractContextManager[None]:
        """Marks the block as recomputation, which must not be merged with the first computation."""
        return nullcontext()

    def unseen(self) -> AbstractContextManager[Any]:
        """Hides the block's operations from dispatch modes, so that no other recorder takes them; a graph has them as nodes."""
        return nullcontext() if self.records else disable_dispatch_modes()

    def gathers(self, gathering: UnitGathering | None) -> None:
        """Notes how units of params are gathered."""

    def ran(self, module: Any) -> None:
        """Notes the modes in which the loss runs a module."""

    def buffer(self, module: Any, name: str, buffer: Tensor) -> Tensor:
        """A module's buffer that is not in the state, or the graph's input for it."""
        return buffer


class _OfThread(threading.local):
    """State of the current thread.

    Attributes:
        group: the world, if the thread is a simulated rank.
        simulates: whether it waits for the ranks of a simulation.
        recorder: records its collectives while a step is traced.
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
    """What records this thread's collectives; it records none if they are performed."""
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
