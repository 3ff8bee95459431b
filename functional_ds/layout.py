"""How a tree of tensors lies in equal shards: data and index arithmetic, no communication.

Leaves are grouped into *units* (what is gathered together), and within a unit into *segments* (what lies in one flat
tensor: leaves of one dtype that are marked alike, all trained or all frozen for one). A segment is padded to a multiple
of n and cut into n contiguous shards.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from . import tree
from .trainable import is_trainable, like_marked, part_of, stored_in

__all__ = ["Layout", "Segment", "Slot", "Unit", "block_of", "shard", "unshard"]

_ALIGNMENT = 16  # bytes; every leaf of a flat tensor starts at a multiple of this, as vector loads want it


@attrs.frozen
class Slot:
    """Where a leaf lies in its segment."""

    leaf: int
    offset: int
    shape: tuple[int, ...]
    numel: int


@attrs.frozen
class Segment:
    """Leaves of one unit and dtype, marked alike, in one flat tensor of ``n * shard`` elements."""

    unit: int
    dtype: torch.dtype
    trainable: bool
    slots: tuple[Slot, ...]
    shard: int

    def views(self, flat: Tensor) -> list[Tensor]:
        """The leaves, as views of the flat tensor."""
        return [flat[s.offset : s.offset + s.numel].view(s.shape) for s in self.slots]


@attrs.frozen
class Unit:
    """Leaves that are gathered together."""

    name: str
    segments: tuple[int, ...]


@attrs.frozen
class Layout:
    """A tree's units and segments for shards of n ranks.

    Attributes:
        n: how many shards.
        units: in the order in which the tree first names them.
        segments: all units' segments; shards and flat tensors are lists in this order.
        paths: the leaves' paths.
        spec: the tree's structure.
    """

    n: int
    units: tuple[Unit, ...]
    segments: tuple[Segment, ...]
    paths: tuple[str, ...]
    spec: optree.PyTreeSpec = attrs.field(repr=False)

    @staticmethod
    def of(params: Any, n: int, unit_of: Callable[[str], str] | None = None) -> "Layout":
        """The layout of a tree; ``unit_of`` names the unit of a path, by default its block (``block_of``).

        Leaves that are marked to belong to different parts of the model lie in different units.
        """
        leaves = tree.tensors(params, "params")
        paths = tuple(path for path, _ in tree.named(params))
        members: dict[tuple[str | None, str], dict[tuple[torch.dtype, bool, torch.dtype | None], list[int]]] = {}
        place = {path: index for index, path in enumerate(paths)}
        for index in (place[path] for path in tree.as_written(params)):  # as a model uses its leaves, more or less
            leaf = leaves[index]
            kinds = members.setdefault((part_of(leaf), (unit_of or block_of)(paths[index])), {})
            kinds.setdefault((leaf.dtype, is_trainable(leaf), stored_in(leaf)), []).append(index)
        units: list[Unit] = []
        segments: list[Segment] = []
        for (part, name), kinds in members.items():
            first = len(segments)
            for (dtype, trainable, _), indices in kinds.items():
                segments.append(_segment(len(units), dtype, trainable, [(i, leaves[i]) for i in indices], n))
            units.append(Unit(name if part is None else f"{part}: {name}", tuple(range(first, len(segments)))))
        return Layout(n, tuple(units), tuple(segments), paths, tree.structure(params))

    def restrict(self, paths: Collection[str]) -> tuple["Layout", tuple[int, ...]]:
        """The layout of these leaves alone, as a dict by path, and which segments they lie in.

        Raises:
            ValueError: a segment holds some of them and others, too.

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
        """The tree as one flat tensor a segment, padding zeroed."""
        leaves = tree.leaves(params)
        flats = []
        for segment in self.segments:
            like = leaves[segment.slots[0].leaf]
            flat = torch.zeros(self.n * segment.shard, dtype=segment.dtype, device=like.device)
            for slot, view in zip(segment.slots, segment.views(flat), strict=True):
                view.copy_(leaves[slot.leaf].detach())
            flats.append(like_marked(flat, like))
        return flats

    def unflatten(self, flats: Sequence[Tensor]) -> Any:
        """The inverse of ``flatten``: leaves of their own, padding cropped."""
        leaves: list[Tensor | None] = [None] * len(self.paths)
        for segment, flat in zip(self.segments, flats, strict=True):
            for slot, view in zip(segment.slots, segment.views(flat.detach()), strict=True):
                leaves[slot.leaf] = like_marked(view.clone(), flat)
        return tree.unflatten(self.spec, leaves)

    def own(self, flats: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Rank ``rank``'s shards, as views of the flat tensors."""
        cuts = zip(self.segments, flats, strict=True)
        return [like_marked(flat.detach()[rank * s.shard : (rank + 1) * s.shard], flat) for s, flat in cuts]


def _segment(unit: int, dtype: torch.dtype, trainable: bool, members: list[tuple[int, Tensor]], n: int) -> Segment:
    step = max(1, _ALIGNMENT // dtype.itemsize)
    slots, end = [], 0
    for index, leaf in members:
        start = -(-end // step) * step
        end = start + leaf.numel()
        slots.append(Slot(index, start, tuple(leaf.shape), leaf.numel()))
    return Segment(unit, dtype, trainable, tuple(slots), -(-end // n))


def block_of(path: str) -> str:
    """The repeated block that a path lies in, up to its first number; "rest" where there is none.

    >>> block_of("transformer.h.3.attn.weight"), block_of("wte.weight")
    ('transformer.h.3', 'rest')
    """
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return "rest"


def shard(params: Any, layout: Layout, rank: int) -> list[Tensor]:
    """Rank ``rank``'s shard of each segment.

    Law: ``unshard([shard(t, layout, r) for r in range(n)], layout) = t``, bitwise.

    >>> params = {"w": torch.arange(5.0)}
    >>> layout = Layout.of(params, 2)
    >>> [shard(params, layout, rank)[0].tolist() for rank in range(2)]
    [[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]
    """
    if not 0 <= rank < layout.n:
        raise ValueError(f"rank={rank} is out of range: the layout has {layout.n} shards")
    return [like_marked(own.detach().clone(), own) for own in layout.own(layout.flatten(params), rank)]


def unshard(shards: Sequence[Sequence[Tensor]], layout: Layout) -> Any:
    """The tree, from all ranks' shards in rank order."""
    if len(shards) != layout.n:
        raise ValueError(f"shards: {len(shards)} ranks' shards for a layout of {layout.n}")
    return layout.unflatten(
        [like_marked(torch.cat([p.detach() for p in pieces]), pieces[0]) for pieces in zip(*shards, strict=True)]
    )
