"""The layout of a tree of tensors in equal shards: data and index arithmetic, no communication.

Leaves are grouped into *units*, which are gathered as one (FSDP's units), and within a unit into *segments*. A segment is one
flat tensor (FSDP's flat parameter): it holds leaves of one dtype with equal marks, so all are trained or all are frozen. It is
padded to a multiple of n and cut into n contiguous shards.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import is_dtensor, is_trainable, like_marked, mark_slices, part_of, slices_of, stored_in

from .grouping import UnitOf, unit_names
from .leaf_slice import LeafSlice
from .sources import home, piece

__all__ = ["Layout", "Segment", "Slot", "Unit", "shard", "unshard"]

_ALIGNMENT = 16  # bytes; every leaf of a flat tensor starts at a multiple of this, as vector loads want it


@attrs.frozen
class Slot:
    """The place of a leaf in its segment.

    Attributes:
        leaf: the leaf's index in the tree.
        offset: where it begins in the flat tensor.
        shape: its shape.
        numel: its number of elements.
        slices: what this rank's leaf is of a whole one; ranks that share the layout may have other slices.
    """

    leaf: int
    offset: int
    shape: tuple[int, ...]
    numel: int
    slices: tuple[LeafSlice, ...] = attrs.field(default=(), repr=False)


@attrs.frozen
class Segment:
    """Leaves of one unit and dtype, with equal marks, in one flat tensor.

    Attributes:
        unit: the index of the unit.
        dtype: the leaves' dtype.
        trainable: whether they are trained.
        slots: their places.
        shard: the elements of a rank's shard; if one rank owns the segment, of that rank's.
        size: the elements of the flat tensor: ``n * shard``, or ``shard`` if one rank owns the segment.
        owner: the rank that has the whole segment; None if every rank has a shard.
        persistent: whether its params stay whole on every rank in stage 3, which gathers others at first touch.
    """

    unit: int
    dtype: torch.dtype
    trainable: bool
    slots: tuple[Slot, ...]
    shard: int
    size: int
    owner: int | None = None
    persistent: bool = False

    def cut(self, rank: int) -> tuple[int, int]:
        """The start and stop of rank ``rank``'s shard in the flat tensor."""
        if self.owner is None:
            return rank * self.shard, (rank + 1) * self.shard
        return (0, self.size) if rank == self.owner else (0, 0)

    def own(self, flat: Tensor, rank: int) -> Tensor:
        """Rank ``rank``'s shard, as a view of the flat tensor."""
        start, stop = self.cut(rank)
        return like_marked(flat.detach()[start:stop], flat)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The leaves, as views of the flat tensor."""
        return [flat[s.offset : s.offset + s.numel].view(s.shape) for s in self.slots]


@attrs.frozen
class Unit:
    """Leaves that are gathered as one."""

    name: str
    segments: tuple[int, ...]


@attrs.frozen
class Layout:
    """A tree's units and segments for shards of n ranks.

    Attributes:
        n: the number of shards.
        units: in the order in which the tree first names them.
        segments: the segments of all units; lists of shards or flat tensors are in this order.
        paths: the leaves' paths.
        spec: the tree's structure.
    """

    n: int
    units: tuple[Unit, ...]
    segments: tuple[Segment, ...]
    paths: tuple[str, ...]
    spec: optree.PyTreeSpec

    def __repr__(self) -> str:
        elements = sum(slot.numel for segment in self.segments for slot in segment.slots)
        return (
            f"Layout({len(self.paths)} leaves in {len(self.units)} units and {len(self.segments)} segments, "
            f"{elements:,} elements, {self.n} shards)"
        )

    @staticmethod
    def of(
        params: Any,
        n: int,
        unit_of: UnitOf | None = None,
        *,
        persistent: Callable[[Tensor], bool] = lambda leaf: False,
        owned: bool = False,
    ) -> "Layout":
        """The layout of a tree. Leaves that are marked as different parts of the model lie in different units.

        Args:
            params: the tree.
            n: the number of shards.
            unit_of: names the unit of a path, by default its block (``fds.units.by_block``).
            persistent: tells which leaves stay whole; they get segments of their own.
            owned: gives each whole unit to one rank: the largest unit first, each to the rank that owns least so far.

        Raises:
            TypeError: a leaf is no tensor, or a DTensor.
        """
        leaves = tree.tensors(params, "params")
        paths = tuple(path for path, _ in tree.named(params))
        for path, leaf in zip(paths, leaves, strict=True):
            if is_dtensor(leaf):
                raise TypeError(
                    f"params: the leaf {path!r} is a DTensor, which torch has cut over a mesh of its own; pass whole tensors, "
                    "leaf.full_tensor(), and the transforms cut them"
                )
        place = {path: index for index, path in enumerate(paths)}
        written = {path: leaves[place[path]] for path in tree.as_written(params)}  # as a model uses its leaves, more or less
        members: dict[tuple[str | None, str], dict[_Kind, list[int]]] = {}
        names = unit_names(unit_of, written)
        for path, leaf in written.items():
            kind = leaf.dtype, is_trainable(leaf), stored_in(leaf), persistent(leaf)
            members.setdefault((part_of(leaf), names[path]), {}).setdefault(kind, []).append(place[path])
        owners = _owners([sum(leaves[i].nbytes for kind in kinds.values() for i in kind) for kinds in members.values()], n)
        units: list[Unit] = []
        segments: list[Segment] = []
        for ((part, name), kinds), owner in zip(members.items(), owners, strict=True):
            first = len(segments)
            for (dtype, trainable, _, whole), indices in kinds.items():
                slots, size = _slots(dtype, [(i, leaves[i]) for i in indices])
                shard = size if owned else -(-size // n)
                owned_by, size = (owner, size) if owned else (None, n * shard)
                segments.append(Segment(len(units), dtype, trainable, slots, shard, size, owned_by, whole))
            units.append(Unit(name if part is None else f"{part}: {name}", tuple(range(first, len(segments)))))
        return Layout(n, tuple(units), tuple(segments), paths, tree.structure(params))

    def restrict(self, paths: Collection[str]) -> tuple["Layout", tuple[int, ...]]:
        """The layout of some of the leaves, as a dict by path, and the indices of their segments.

        Raises:
            ValueError: a segment holds both some of these leaves and others.

        >>> layout = Layout.of({"0.w": torch.ones(4), "1.w": torch.ones(6)}, 2)
        >>> part, places = layout.restrict(["1.w"])
        >>> part.paths, [unit.name for unit in part.units], places
        (('1.w',), ['1'], (1,))
        """
        chosen = [i for i, s in enumerate(self.segments) if any(self.paths[slot.leaf] in paths for slot in s.slots)]
        names = sorted(self.paths[slot.leaf] for i in chosen for slot in self.segments[i].slots)
        beyond = [name for name in names if name not in paths]
        if beyond:
            raise ValueError(f"paths: {', '.join(beyond)} lie in one segment with some of them; mark the parts before")
        place = {name: index for index, name in enumerate(names)}
        units: list[Unit] = []
        segments: list[Segment] = []
        for unit in self.units:
            kept = [self.segments[i] for i in unit.segments if i in chosen]
            if kept:
                first = len(segments)
                for segment in kept:
                    slots = tuple(attrs.evolve(slot, leaf=place[self.paths[slot.leaf]]) for slot in segment.slots)
                    segments.append(attrs.evolve(segment, unit=len(units), slots=slots))
                units.append(Unit(unit.name, tuple(range(first, len(segments)))))
        spec = tree.structure(dict.fromkeys(names, 0))
        return Layout(self.n, tuple(units), tuple(segments), tuple(names), spec), tuple(chosen)

    def flatten(self, params: Any) -> list[Tensor]:
        """The tree as a list of flat tensors, one for each segment; padding is zero."""
        leaves = tree.leaves(params)
        return [self.stretch(leaves, index, 0, segment.size) for index, segment in enumerate(self.segments)]

    def stretch(
        self, leaves: Sequence[Tensor], index: int, start: int, stop: int, bring: Callable[[Tensor], Tensor] = lambda leaf: leaf
    ) -> Tensor:
        """Elements ``start`` to ``stop`` of a segment's flat tensor. Deferred leaves are read.

        Args:
            leaves: the tree's leaves.
            index: the segment.
            start: the first element.
            stop: the element after the last.
            bring: is called on each leaf of the segment first, also on those outside the stretch, so it may communicate.
        """
        segment = self.segments[index]
        like = leaves[segment.slots[0].leaf]
        flat = torch.zeros(stop - start, dtype=segment.dtype, device=home(like))
        for slot in segment.slots:
            leaf = bring(leaves[slot.leaf])
            low, high = max(slot.offset, start), min(slot.offset + slot.numel, stop)
            if high > low:
                flat[low - start : high - start] = piece(leaf, low - slot.offset, high - slot.offset)
        flat = like_marked(flat, like)
        return mark_slices(flat, ()) if slices_of(like) else flat  # its slots have the slices

    def unflatten(self, flats: Sequence[Tensor]) -> Any:
        """The inverse of ``flatten``; the leaves share no memory with the flat tensors."""
        leaves: list[Tensor | None] = [None] * len(self.paths)
        for segment, flat in zip(self.segments, flats, strict=True):
            for slot, view in zip(segment.slots, segment.views(flat.detach()), strict=True):
                leaf = like_marked(view.clone(), flat)
                leaves[slot.leaf] = mark_slices(leaf, slot.slices) if slot.slices else leaf
        return tree.unflatten(self.spec, leaves)

    def own(self, flats: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Rank ``rank``'s shards, as views of the flat tensors."""
        return [segment.own(flat, rank) for segment, flat in zip(self.segments, flats, strict=True)]


_Kind = tuple[torch.dtype, bool, torch.dtype | None, bool]  # leaves of one kind share a segment


def _slots(dtype: torch.dtype, members: list[tuple[int, Tensor]]) -> tuple[tuple[Slot, ...], int]:
    """The slots of leaves in order, each at an aligned offset, and the end of the last one."""
    step = max(1, _ALIGNMENT // dtype.itemsize)
    slots, end = [], 0
    for index, leaf in members:
        start = -(-end // step) * step
        end = start + leaf.numel()
        slots.append(Slot(index, start, tuple(leaf.shape), leaf.numel(), slices_of(leaf)))
    return tuple(slots), end


def _owners(sizes: Sequence[int], n: int) -> list[int]:
    """A rank for each size: the largest size first, each to the rank that owns least so far."""
    load, owners = [0] * n, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = load.index(min(load))
        load[owners[index]] += sizes[index]
    return owners


def shard(params: Any, layout: Layout, rank: int) -> list[Tensor]:
    """Rank ``rank``'s shard of each segment.

    Law: ``unshard([shard(t, layout, r) for r in range(n)], layout) = t``, bitwise.

    Args:
        params: a tree of tensors.
        layout: how its leaves are divided, as ``Layout.of(params, n)`` gives it.
        rank: which of the n shards.

    >>> params = {"w": torch.arange(5.0)}
    >>> layout = Layout.of(params, 2)
    >>> [shard(params, layout, rank)[0].tolist() for rank in range(2)]
    [[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]
    """
    if not 0 <= rank < layout.n:
        raise ValueError(f"rank={rank} is out of range: the layout has {layout.n} shards")
    leaves = tree.leaves(params)
    return [layout.stretch(leaves, index, *segment.cut(rank)) for index, segment in enumerate(layout.segments)]


def unshard(shards: Sequence[Sequence[Tensor]], layout: Layout) -> Any:
    """The tree, from all ranks' shards in rank order; the inverse of ``shard``."""
    if len(shards) != layout.n:
        raise ValueError(f"shards: {len(shards)} ranks' shards for a layout of {layout.n}")
    return layout.unflatten(
        [like_marked(torch.cat([p.detach() for p in pieces]), pieces[0]) for pieces in zip(*shards, strict=True)]
    )
