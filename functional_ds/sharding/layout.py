"""Layouts of pytrees in equal shards: index arithmetic, without communication.

Leaves are grouped into *units*, which are gathered as one (FSDP's units), and within a unit into *segments*. A segment is one
flat tensor (FSDP's flat parameter) of leaves of one dtype with equal marks, so all are trained or all are frozen. It is padded
to a multiple of n and split into n contiguous shards.

Leaves that are shared by some of the ranks only, such as experts, form separate units, whose segments are split into as many
shards as ranks share them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import (
    is_dtensor,
    is_trainable,
    like_marked,
    mark_slices,
    part_of,
    sharers_of,
    slices_of,
    stored_in,
)

from .grouping import UnitOf, unit_names
from .segment import Blocks, Segment, Slot, Unit
from .sources import Origin, Source, deferred, home, piece

_ALIGNMENT = 16  # bytes; leaves of a flat tensor start at multiples of this, for vector loads


@attrs.frozen
class Layout:
    """How a pytree is divided into units, segments and n shards.

    Attributes:
        n: the number of shards.
        units: in the order of their first leaves in the tree.
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

    @property
    def has_sharers(self) -> bool:
        """Whether some leaves are shared by blocks of the ranks only."""
        return any(segment.sharers is not None for segment in self.segments)

    @staticmethod
    def of(
        params: Any,
        n: int,
        unit_of: UnitOf | None = None,
        *,
        persistent: Callable[[Tensor], bool] = lambda leaf: False,
        owned: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> "Layout":
        """Makes the layout of a pytree. Leaves that are marked as different parts of the model get different units.

        Args:
            params: the tree.
            n: the number of shards.
            unit_of: names the unit of a path, by default its block (``fds.units.by_block``).
            persistent: whether a leaf stays whole; such leaves get separate segments.
            owned: assigns each whole unit to one rank: the largest unit first, each to the rank that owns least so far.
            ranks: the rank of the world of each shard, for leaves that are marked with their sharers; None for 0 to n - 1.

        Raises:
            TypeError: a leaf is not a tensor, or is a DTensor.
            ValueError: two leaves have the same path; the sharers of a leaf are not these ranks.
        """
        leaves = tree.tensors(params, "params")
        tree.check_paths(params, "params")
        paths = tuple(path for path, _ in tree.named(params))
        for path, leaf in zip(paths, leaves, strict=True):
            if is_dtensor(leaf):
                raise TypeError(
                    f"params: the leaf {path!r} is a DTensor, which torch has split over a mesh of its own; pass whole "
                    "tensors, leaf.full_tensor(), and the transforms split them"
                )
        place = {path: index for index, path in enumerate(paths)}
        written = {path: leaves[place[path]] for path in tree.as_written(params)}  # as a model uses its leaves, more or less
        members: dict[tuple[str | None, Blocks | None, str], dict[_Kind, list[int]]] = {}
        names, shards = unit_names(unit_of, written), {rank: place for place, rank in enumerate(ranks or range(n))}
        for path, leaf in written.items():
            cuts = tuple(len(cut.sharers) for cut in slices_of(leaf))
            segment_key = leaf.dtype, is_trainable(leaf), stored_in(leaf), persistent(leaf), cuts
            unit = part_of(leaf), _sharers(path, leaf, shards), names[path]
            members.setdefault(unit, {}).setdefault(segment_key, []).append(place[path])
        sizes = [sum(leaves[i].nbytes for indices in kinds.values() for i in indices) for kinds in members.values()]
        owners = _owners(list(zip(sizes, (sharers for _, sharers, _ in members), strict=True)), n)
        units: list[Unit] = []
        segments: list[Segment] = []
        for ((part, sharers, name), kinds), owner in zip(members.items(), owners, strict=True):
            first, count = len(segments), n if sharers is None else len(sharers[0])
            for (dtype, trainable, _, whole, _), indices in kinds.items():
                slots, size = _slots(dtype, [(i, leaves[i]) for i in indices])
                shard = size if owned else -(-size // count)
                owned_by, size = (owner, size) if owned else (None, count * shard)
                segments.append(Segment(len(units), dtype, trainable, slots, shard, size, owned_by, whole, sharers))
            units.append(Unit.of(name if part is None else f"{part}: {name}", segments[first:], first))
        return Layout(n, tuple(units), tuple(segments), paths, tree.structure(params))

    def restrict(self, paths: Collection[str]) -> tuple["Layout", tuple[int, ...]]:
        """The layout of some of the leaves, as a dict by path, and the indices of their segments.

        Raises:
            ValueError: a segment contains some of these leaves and others.

        >>> layout = Layout.of({"0.w": torch.ones(4), "1.w": torch.ones(6)}, 2)
        >>> part, places = layout.restrict(["1.w"])
        >>> part.paths, [unit.name for unit in part.units], places
        (('1.w',), ['1'], (1,))
        """
        chosen = [i for i, s in enumerate(self.segments) if any(self.paths[slot.leaf] in paths for slot in s.slots)]
        names = sorted(self.paths[slot.leaf] for i in chosen for slot in self.segments[i].slots)
        beyond = [name for name in names if name not in paths]
        if beyond:
            raise ValueError(f"paths: {', '.join(beyond)} are in one segment with some of them; mark the parts before")
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
                units.append(Unit.of(unit.name, segments[first:], first))
        spec = tree.structure(dict.fromkeys(names, 0))
        return Layout(self.n, tuple(units), tuple(segments), tuple(names), spec), tuple(chosen)

    def flatten(self, params: Any) -> list[Tensor]:
        """The tree as a list of flat tensors, one per segment, padded with zeros."""
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
            bring: is applied to each leaf of the segment first, also outside the range, so it may communicate.
        """
        segment = self.segments[index]
        like = leaves[segment.slots[0].leaf]
        flat = torch.zeros(stop - start, dtype=segment.dtype, device=home(like))
        for slot in segment.slots:
            leaf = bring(leaves[slot.leaf])
            low, high = max(slot.offset, start), min(slot.offset + slot.numel, stop)
            if high > low:
                flat[low - start : high - start] = piece(leaf, low - slot.offset, high - slot.offset)
        return _marked(flat, like)

    def deferred(self, leaves: Sequence[Tensor], index: int, size: int, source: Source) -> Tensor:
        """``size`` elements of a segment as a deferred leaf, whose path in the source is the segment's number."""
        like = leaves[self.segments[index].slots[0].leaf]
        bare = torch.empty(size, dtype=self.segments[index].dtype, device="meta")
        return deferred(_marked(bare, like), Origin(source, str(index), home(like)))

    def unflatten(self, flats: Sequence[Tensor]) -> Any:
        """The inverse of ``flatten``; the leaves share no memory with the flat tensors."""
        leaves: list[Tensor | None] = [None] * len(self.paths)
        for segment, flat in zip(self.segments, flats, strict=True):
            for slot, view in zip(segment.slots, segment.views(flat.detach()), strict=True):
                leaf = like_marked(view.clone(), flat)
                leaves[slot.leaf] = mark_slices(leaf, slot.slices) if slot.slices else leaf
        return tree.unflatten(self.spec, leaves)

    def own(self, flats: Sequence[Tensor], rank: int) -> list[Tensor]:
        """The shards of a rank, as views of the flat tensors."""
        return [segment.own(flat, rank) for segment, flat in zip(self.segments, flats, strict=True)]


def _marked(flat: Tensor, like: Tensor) -> Tensor:
    """A part of a segment, with the marks of its leaves."""
    flat = like_marked(flat, like)
    return mark_slices(flat, ()) if slices_of(like) else flat  # its slots have the slices


_Kind = tuple[torch.dtype, bool, torch.dtype | None, bool, tuple[int, ...]]  # leaves of one kind share a segment


def _slots(dtype: torch.dtype, members: list[tuple[int, Tensor]]) -> tuple[tuple[Slot, ...], int]:
    """The slots of leaves in order, each at an aligned offset, and the end of the last one."""
    step = max(1, _ALIGNMENT // dtype.itemsize)
    slots, end = [], 0
    for index, leaf in members:
        start = -(-end // step) * step
        end = start + leaf.numel()
        slots.append(Slot(index, start, tuple(leaf.shape), leaf.numel(), slices_of(leaf)))
    return tuple(slots), end


def _sharers(path: str, leaf: Tensor, shards: Mapping[int, int]) -> Blocks | None:
    """A leaf's blocks of sharers, as indices of shards.

    Raises:
        ValueError: they are not the ranks of the shards.
    """
    blocks = sharers_of(leaf)
    if blocks is None:
        return None
    named = sorted(rank for block in blocks for rank in block)
    if named != sorted(shards) or len({len(block) for block in blocks}) != 1:
        raise ValueError(
            f"params: the leaf {path!r} is shared within the blocks {[list(block) for block in blocks]} of ranks, but data "
            f"parallelism is over the ranks {list(shards)}; all of these must be in blocks of one size: of experts, pass the "
            "two axes into which mesh.split splits that of zero"
        )
    return tuple(tuple(shards[rank] for rank in block) for block in blocks) if len(shards) > 1 else None


def _owners(sizes: Sequence[tuple[int, Blocks | None]], n: int) -> list[int]:
    """Owners (or their index in each block of sharers): largest size first, each to the rank that owns least so far."""
    load, owners = [0] * n, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i][0]):
        size, blocks = sizes[index]
        columns = list(zip(*blocks, strict=True)) if blocks else [(rank,) for rank in range(n)]
        heaviest = [max(load[rank] for rank in column) for column in columns]
        owners[index] = heaviest.index(min(heaviest))
        for rank in columns[owners[index]]:
            load[rank] += size
    return owners


def shard(params: Any, layout: Layout, rank: int) -> list[Tensor]:
    """Splits a pytree; returns the shard of each segment of one rank.

    Law: ``unshard([shard(t, layout, r) for r in range(n)], layout) = t``, bitwise.

    Args:
        params: a pytree of tensors.
        layout: its layout, ``Layout.of(params, n)``.
        rank: the index of the shard.

    Raises:
        ValueError: ``rank`` is not in 0..n - 1.

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
    """Joins all ranks' shards, in rank order, to the pytree: the inverse of ``shard``.

    Leaves that are shared by blocks of ranks are taken from the first block.

    Raises:
        ValueError: the number of ranks is not that of the layout.

    >>> params = {"w": torch.arange(5.0), "b": torch.zeros(2)}
    >>> layout = Layout.of(params, 2)
    >>> unshard([shard(params, layout, rank) for rank in range(2)], layout)
    {'w': tensor([0., 1., 2., 3., 4.]), 'b': tensor([0., 0.])}
    """
    if len(shards) != layout.n:
        raise ValueError(f"shards: {len(shards)} ranks' shards for a layout of {layout.n}")
    flats = []
    for segment, pieces in zip(layout.segments, zip(*shards, strict=True), strict=True):
        block = pieces if segment.sharers is None else [pieces[rank] for rank in segment.sharers[0]]
        flats.append(like_marked(torch.cat([p.detach() for p in block]), block[0]))
    return layout.unflatten(flats)
