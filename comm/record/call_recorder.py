"""The protocol of recorders, which record a thread's collectives instead of performing them while a step is traced."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
from torch import Tensor

from functional_ds.comm.table.collective import Call, Handle

from .group import Group


@attrs.frozen
class UnitGathering:
    """How an eager step gathers units of sharded params, for graph passes that do the same.

    Attributes:
        live: how many units are gathered at once.
        reshard: whether the last units of the forward pass are freed before the backward pass.
        ahead: how many gathers may be prefetched.
        keeps_first_level: whether the result of a gather's first level of groups is kept (hpZ).
    """

    live: int
    reshard: bool
    ahead: int
    keeps_first_level: bool


class Outside:
    """What a trace leaves as it is, such as files, and what is in them."""


class GraphLeaf(Outside):
    """A leaf of a state that is no tensor, and a tensor of the graph carries it.

    Attributes:
        kind: what a graph depends on of it.
    """

    kind: Any

    def in_graph(self, token: Tensor) -> "TracedLeaf":
        """What stands for it while its step is traced."""
        raise NotImplementedError


class TracedLeaf:
    """A leaf of a traced state.

    Attributes:
        token: the graph's tensor that carries it.
    """

    token: Tensor


@attrs.define(eq=False)
class TraceNotes:
    """What a step notes while it is traced, for graph passes and for the next state.

    Attributes:
        gathering: how units of params are gathered; None if the graph gathers none.
        modes: the modes of the modules that the loss runs.
        buffers: the graph's inputs for buffers that are not in the state, by module and name.
    """

    gathering: UnitGathering | None = None
    modes: dict[Any, tuple[int, ...]] = attrs.field(factory=dict)
    buffers: Mapping[tuple[Any, str], Tensor] = attrs.field(factory=dict)


class CallRecorder(Protocol):
    """Records a rank's collectives while its step is traced.

    Attributes:
        notes: the step's notes.
        trial: whether the results are unused.
    """

    notes: TraceNotes
    trial: bool

    def eager(self, function: Callable[..., Tensor], xs: Sequence[Tensor]) -> Tensor:
        """Adds a call of a function to the graph without tracing it, as its inner shapes depend on values; its result."""
        ...

    def host(
        self, function: Callable[..., Any], given: Sequence[Tensor], memory: Sequence[Tensor] = (), like: Tensor | None = None
    ) -> Tensor:
        """Adds a call of a function of what tensors carry, and of memory that it may write: a tensor that carries its result.

        With ``like`` the result itself is a tensor, of this shape and dtype.
        """
        ...

    def labelled(self, name: str) -> AbstractContextManager[None]:
        """Labels the collectives inside the block, and the operations around them."""
        ...

    def recomputing(self) -> AbstractContextManager[None]:
        """Marks the block as recomputation, which must not be merged with the first computation."""
        ...

    def start(self, call: Call, leaves: Sequence[Tensor], group: Group, *, beside: bool, early: bool) -> Handle:
        """Adds the call to the graph; its handle gives results without values."""
        ...
