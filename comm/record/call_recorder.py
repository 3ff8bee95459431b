"""What writes a thread's collectives down instead of carrying them out, where a step is traced into a graph."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
from torch import Tensor

from functional_ds.comm.table.collective import Call, Handle

from .group import Group

__all__ = ["CallRecorder", "TraceNotes", "UnitGathering"]


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
