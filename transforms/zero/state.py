"""zero's slot in the state: how the params lie in shards, and what the ranks have learned about the order of things."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.step.slots import Role

from .prefetch import Route
from .reduce import Order

__all__ = ["Learned", "Partition", "SomeLeaves"]


@attrs.define(eq=False)
class Learned:
    """What the ranks found out together about the order of things, and what is worked out once; it changes no value."""

    order: Order
    parts: LeafMap
    forward: Route = attrs.field(factory=Route)
    backward: Route = attrs.field(factory=Route)
    of_parts: "dict[frozenset[str], SomeLeaves]" = attrs.field(factory=dict)
    by_dtypes: dict[tuple[torch.dtype, ...], Layout] = attrs.field(factory=dict)

    @staticmethod
    def fresh(layout: Layout, parts: LeafMap) -> "Learned":
        """Before anything is learned."""
        return Learned(Order(tuple(dict.fromkeys(s.unit for s in reversed(layout.segments) if s.trainable))), parts)

    def of_part(self, layout: Layout, paths: frozenset[str]) -> "SomeLeaves":
        """The same for some of the leaves alone, which is learned alone."""
        if paths not in self.of_parts:
            alone, segments = layout.restrict(paths)
            self.of_parts[paths] = SomeLeaves(alone, segments, Learned.fresh(alone, LeafMap.of_layout(alone, None)))
        return self.of_parts[paths]

    def __eq__(self, other: object) -> bool:
        """Not what makes two states differ in structure."""
        return isinstance(other, Learned)

    __hash__ = None  # type: ignore[assignment]


@attrs.frozen(eq=False)
class SomeLeaves:
    """Some of the leaves: how they lie, in which of all segments, and what is learned about them."""

    layout: Layout
    segments: tuple[int, ...]
    learned: Learned


@tree.record
class Partition:
    """How the params lie in shards.

    Attributes:
        layout: where each leaf lies.
        learned: what changes no value.
        exact: where params are whole between steps and what is gathered is compressed: this rank's shards as the optimizer
            has them, None for segments that are in shards anyway. Empty where there is nothing to keep.
        frozen: the whole frozen segments, by number, while ``scatter`` has put shards in their place.
    """

    layout: Layout = tree.static()
    learned: Learned = tree.static()
    exact: Sequence[Tensor | None] = ()
    frozen: Mapping[int, Tensor] = attrs.field(factory=dict)

    roles: ClassVar[Mapping[str, Role]] = {"exact": Role.EXACT}

    @property
    def leaf_map(self) -> LeafMap:
        """Which leaf lies where in what the optimizer gets."""
        return self.learned.parts

    def as_stored(self, stored: Sequence[Any]) -> Layout:
        """The layout with the dtypes that are stored: mixed precision stores others than it was given."""
        dtypes, known = tuple(flat.dtype for flat in stored), self.learned.by_dtypes
        if dtypes not in known:
            pairs = zip(self.layout.segments, dtypes, strict=True)
            known[dtypes] = attrs.evolve(self.layout, segments=tuple(attrs.evolve(s, dtype=dtype) for s, dtype in pairs))
        return known[dtypes]
