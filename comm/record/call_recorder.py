"""Who writes the collectives of this thread down instead of carrying them out, where a step is traced into a graph."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import attrs
from torch import Tensor

from functional_ds.base.torch_private import is_fake
from functional_ds.comm.table.collective import Call, Handle

from .group import Group

__all__ = [
    "CallRecorder",
    "TraceNotes",
    "UnitGathering",
    "current_recorder",
    "labelled",
    "recomputing",
    "recording",
    "runs_on_shapes",
]


@attrs.frozen
class UnitGathering:
    """How an eager step gathers units of params that are in shards, which passes over its graph do alike.

    Attributes:
        live: how many units are whole at once.
        reshard: whether a backward pass finds none of the units that its forward pass ends with.
        ahead: how many gathers may be under way beside the one that is waited for.
        keeps_first_level: whether the result of a gather's first level of groups stays (hpZ).
    """

    live: int
    reshard: bool
    ahead: int
    keeps_first_level: bool


@attrs.define(eq=False)
class TraceNotes:
    """What a step says of itself while it is traced, for passes over its graph and for the next state.

    Attributes:
        gathering: of its units of params; None where the graph gathers none.
        modes: of the modules that the loss runs.
        buffers: the graph's inputs for buffers that no state has, by module and name.
    """

    gathering: UnitGathering | None = None
    modes: dict[Any, tuple[int, ...]] = attrs.field(factory=dict)
    buffers: Mapping[tuple[Any, str], Tensor] = attrs.field(factory=dict)


class CallRecorder(Protocol):
    """Takes a rank's collectives while its step runs without values.

    Attributes:
        notes: what the step says of itself.
        trial: whether the results are unused.
    """

    notes: TraceNotes
    trial: bool

    def eager(self, function: Callable[..., Tensor], xs: Sequence[Tensor]) -> Tensor:
        """What a function gives whose inner sizes depend on values, as a call of it in the graph."""
        ...

    def labelled(self, name: str) -> AbstractContextManager[None]:
        """Within the block collectives, and what is computed around them, carry something of this name."""
        ...

    def recomputing(self) -> AbstractContextManager[None]:
        """Within the block a function runs again, and what it computes is no copy of what was computed before."""
        ...

    def start(self, call: Call, leaves: Sequence[Tensor], group: Group, *, beside: bool, early: bool) -> Handle:
        """The call's place in the graph; its handle gives results without values."""
        ...


class _RecorderOfThread(threading.local):
    """What is known of the current thread; a simulated rank is one."""

    recorder: CallRecorder | None = None


_HERE = _RecorderOfThread()


def current_recorder() -> CallRecorder | None:
    """That of this thread; None where collectives are carried out."""
    return _HERE.recorder


@contextmanager
def recording(recorder: CallRecorder) -> Iterator[None]:
    """Within the block this thread's collectives are the recorder's."""
    outer = current_recorder()
    _HERE.recorder = recorder
    try:
        yield
    finally:
        _HERE.recorder = outer


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
