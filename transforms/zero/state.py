"""ZeRO's slot in the state: the layout of the shards, and the orders that the ranks have agreed on."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.comm.backends.pool import Pool
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.step.state.slots import Role

from .reduce import ReduceOrder
from .units.lazy_tensor import LazyLeaves
from .units.prefetch import FetchTrace


@attrs.define(eq=False)
class ZeroCache(tree.Uncompared):
    """The orders that the ranks agreed on in earlier steps, and cached values. It affects speed, never results.

    Attributes:
        order: in which order units are reduced.
        leaf_map: which leaf is where in the shards.
        forward: what forward passes fetched.
        backward: what backward passes fetched.
        subsets: caches for subsets of the leaves, by their paths.
        layouts: the layout with other dtypes, by these.
        pool: memory for gathered units and their gradients.
        functional: whether this rank's loss uses torch.func, so that all units are gathered before it begins.
        interrupted: the source of units of a pass whose loss needs them whole and runs again with a new view.
        lazy: the lazy tensors of the last view that was closed.
    """

    order: ReduceOrder
    leaf_map: LeafMap
    forward: FetchTrace = attrs.field(factory=FetchTrace)
    backward: FetchTrace = attrs.field(factory=FetchTrace)
    subsets: "dict[frozenset[str], Subset]" = attrs.field(factory=dict)
    layouts: dict[tuple[torch.dtype, ...], Layout] = attrs.field(factory=dict)
    pool: Pool = attrs.field(factory=Pool)
    functional: bool = False
    interrupted: Any = None
    lazy: LazyLeaves | None = None

    @staticmethod
    def fresh(layout: Layout, leaf_map: LeafMap) -> "ZeroCache":
        """Before the first step."""
        units = dict.fromkeys(s.unit for s in reversed(layout.segments) if s.trainable)
        return ZeroCache(ReduceOrder(tuple(units)), leaf_map)

    def subset(self, layout: Layout, paths: frozenset[str]) -> "Subset":
        """The leaves with these paths, with their own cache."""
        if paths not in self.subsets:
            alone, segments = layout.restrict(paths)
            cache = ZeroCache.fresh(alone, LeafMap.of_layout(alone, None))
            self.subsets[paths] = Subset(alone, segments, cache)
        return self.subsets[paths]


@attrs.frozen(eq=False)
class Subset:
    """Some of the leaves: their layout, their segments among all segments, and a cache."""

    layout: Layout
    segments: tuple[int, ...]
    cache: ZeroCache


@tree.record
class Partition:
    """How the params are sharded.

    Attributes:
        layout: where each leaf is.
        cache: affects speed only.
        exact: if params are whole between steps and gathers are compressed: this rank's exact shards for the optimizer, None
            for segments that are sharded anyway. Empty if there is nothing to keep, and after ``scatter``.
        frozen: the whole frozen segments and these shards of them, by number, while ``scatter`` has replaced them; else None.
        versions: the version counters of these shards at that time.
    """

    layout: Layout = tree.static()
    cache: ZeroCache = tree.static()
    exact: Sequence[Tensor | None] = ()
    frozen: Mapping[int, tuple[Tensor, Tensor]] | None = None
    versions: tuple[int, ...] = tree.static(default=())

    roles: ClassVar[Mapping[str, Role]] = {"exact": Role.EXACT}

    @property
    def leaf_map(self) -> LeafMap:
        """Which leaf is where in what the optimizer gets."""
        return self.cache.leaf_map
