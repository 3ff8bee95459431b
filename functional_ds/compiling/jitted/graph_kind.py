"""What a graph is specialised on: structure, shapes, modes of modules, and flags of torch."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.comm.record.graph_notes import GraphLeaf
from functional_ds.step.state.buffers import BUFFERS, Buffers
from functional_ds.step.state.state import State


@attrs.define(eq=False)
class GraphKind:
    """The states and batches that one graph is for.

    Attributes:
        leaves: their structure, shapes and numbers.
        modes: of the modules that the loss runs, once known.
        buffers: of these modules, those not in the state, with what a graph depends on.
    """

    leaves: Any
    modes: dict[Any, tuple[int, ...]] = attrs.field(factory=dict)
    buffers: list[tuple[Mapping[str, Any], str, Any]] = attrs.field(factory=list)

    def is_now(self) -> bool:
        """Whether the modules have these modes and buffers."""
        like = all(leaf_kind(store.get(key)) == kind for store, key, kind in self.buffers)
        return like and all(module.notice() == modes for module, modes in self.modes.items())


def kind_of(state: State, batch: Any) -> Any:
    """What a graph depends on besides the values of tensors."""
    leaves, structure = tree.flatten((state, batch))
    flags = (
        torch.get_default_dtype(),
        *map(torch.is_autocast_enabled, ("cpu", "cuda")),
        torch.are_deterministic_algorithms_enabled(),
    )
    held = state.slots.get(BUFFERS)
    return structure, tuple(map(leaf_kind, leaves)), held.links() if isinstance(held, Buffers) else "", flags


def is_settled(state: State) -> bool:
    """Whether an eager step has inspected the writes of the state's modules in their present modes."""
    held = state.slots.get(BUFFERS)
    if not isinstance(held, Buffers):
        return True
    now = {key: module.notice() for module, key in held.known.keys.items()}
    return all(held.known.modes.get(key, modes) == modes for key, modes in now.items())


def leaf_kind(leaf: Any) -> Any:
    """What a graph depends on of one leaf."""
    if isinstance(leaf, GraphLeaf):
        return leaf.kind
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf  # 0.0 is not -0.0, and nan is nan
    bits = leaf.is_conj(), leaf.is_neg()
    return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, bits
