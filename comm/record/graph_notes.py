"""What a step notes while it is traced, and what stands in a traced state for leaves that are no tensors."""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor


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
