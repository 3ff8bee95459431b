"""Which leaf's elements lie where in the tensors that an optimizer gets: data and index arithmetic, no communication.

Under ZeRO an optimizer gets flat tensors, or shards of them, with many leaves in each. Most optimizers move every element
alike and need not know. One that treats leaves differently is a function of ``LeafMap``.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import is_trainable

from .layout import Layout

__all__ = ["Leaf", "LeafMap", "LeafShard", "Run", "find"]


@attrs.frozen
class Leaf:
    """A trained leaf of the user's tree, of the dtype that the user gave it.

    Attributes:
        slices: how many ranks have one of its slices, of this shape, for good.
    """

    path: str
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    slices: int = 1


@attrs.frozen
class LeafShard:
    """``numel`` neighbouring elements of a leaf: from ``offset`` on in the flattened leaf, from ``start`` on in a tensor."""

    leaf: int
    offset: int
    tensor: int
    start: int
    numel: int


@attrs.frozen
class Run:
    """A stretch of a tensor."""

    tensor: int
    start: int
    stop: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The stretch, as a flat view."""
        return tensors[self.tensor].view(-1)[self.start : self.stop]


@attrs.frozen
class LeafMap:
    """All trained leaves, and every rank's pieces of them.

    Attributes:
        leaves: in one order on all ranks.
        ranks: the pieces of each rank of ``group``, those of one tensor by their place in it.
        group: the ranks over which leaves are cut; None where each leaf is whole here.
        rank: this one, in the group.
        unsummed: the ranks that each have gradients of their own, which the optimizer is to sum; None where they are summed.
        elsewhere: paths of further trained leaves: what another rule moves, or only another stage of a pipeline has.
    """

    leaves: tuple[Leaf, ...]
    ranks: tuple[tuple[LeafShard, ...], ...] = attrs.field(repr=False)
    group: comm.Group | None = None
    rank: int = 0
    unsummed: comm.Group | None = None
    elsewhere: tuple[str, ...] = ()

    @property
    def pieces(self) -> tuple[LeafShard, ...]:
        """This rank's."""
        return self.ranks[self.rank]

    @staticmethod
    def of(params: Any) -> "LeafMap":
        """A tree whose leaves lie alone and whole.

        >>> LeafMap.of({"w": torch.ones(2, 3)}).pieces
        (LeafShard(leaf=0, offset=0, tensor=0, start=0, numel=6),)
        """
        trained = [(path, leaf) for path, leaf in tree.named(params) if is_trainable(leaf)]
        leaves = tuple(Leaf(path, tuple(leaf.shape), leaf.numel(), leaf.dtype) for path, leaf in trained)
        pieces = tuple(LeafShard(i, 0, i, 0, leaf.numel) for i, leaf in enumerate(leaves))
        return LeafMap(leaves, (pieces,))

    @staticmethod
    def of_layout(layout: Layout, group: comm.Group | None) -> "LeafMap":
        """The segments of a layout, whole or, with a group, this rank's shards of them.

        >>> layout = Layout.of({"a": torch.ones(5), "b": torch.ones(2)}, 2)
        >>> LeafMap.of_layout(layout, None).pieces
        (LeafShard(leaf=0, offset=0, tensor=0, start=0, numel=5), LeafShard(leaf=1, offset=0, tensor=0, start=8, numel=2))
        """
        segments = [segment for segment in layout.segments if segment.trainable]
        slots = [(tensor, slot) for tensor, segment in enumerate(segments) for slot in segment.slots]
        leaves = tuple(Leaf(layout.paths[slot.leaf], slot.shape, slot.numel, segments[t].dtype) for t, slot in slots)
        if group is None:
            return LeafMap(leaves, (tuple(LeafShard(i, 0, t, slot.offset, slot.numel) for i, (t, slot) in enumerate(slots)),))
        ranks: list[list[LeafShard]] = [[] for _ in range(layout.n)]
        for leaf, (tensor, slot) in enumerate(slots):
            segment, end = segments[tensor], slot.offset + slot.numel
            size = max(segment.shard, 1)
            reached = range(slot.offset // size, -(-end // size)) if segment.owner is None else (segment.owner,)
            for rank in reached:
                start, stop = segment.cut(rank)
                low, high = max(slot.offset, start), min(end, stop)
                if high > low:
                    ranks[rank].append(LeafShard(leaf, low - slot.offset, tensor, low - start, high - low))
        return LeafMap(leaves, tuple(map(tuple, ranks)), group, group.rank)

    def refuse_slices(self, what: str) -> None:
        """For optimizers that look at whole leaves.

        Raises:
            ValueError: some leaf is a slice of one.
        """
        for leaf in self.leaves:
            if leaf.slices > 1:
                raise ValueError(
                    f"{what}: {leaf.path!r} is one of {leaf.slices} slices, but {what} looks at whole leaves; fds.route sends "
                    "such leaves to an optimizer that moves every element alike, adamw say"
                )

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's pieces, as flat views of its tensors."""
        return [tensors[p.tensor].view(-1)[p.start : p.start + p.numel] for p in self.pieces]

    def select(self, leaves: Iterable[int]) -> tuple[tuple[Run, ...], "LeafMap"]:
        """Some of the leaves: the runs that this rank has of them, and the parts that say what lies where in those.

        A run is as long as can be: neighbours that are both selected are one, the padding between them included.
        """
        chosen = sorted(set(leaves))
        number = {leaf: i for i, leaf in enumerate(chosen)}
        found = [_runs(pieces, number) for pieces in self.ranks]
        ranks = tuple(pieces for _, pieces in found)
        others = tuple(leaf.path for i, leaf in enumerate(self.leaves) if i not in number)
        own = tuple(self.leaves[i] for i in chosen)
        return found[self.rank][0], attrs.evolve(self, leaves=own, ranks=ranks, elsewhere=self.elsewhere + others)


def _runs(pieces: Sequence[LeafShard], number: dict[int, int]) -> tuple[tuple[Run, ...], tuple[LeafShard, ...]]:
    """The runs of the numbered leaves, and their pieces in those."""
    runs: list[Run] = []
    inside: list[LeafShard] = []
    before: LeafShard | None = None
    for piece in pieces:
        if piece.leaf in number:
            stop = piece.start + piece.numel
            if before is not None and before.leaf in number and before.tensor == piece.tensor:
                runs[-1] = attrs.evolve(runs[-1], stop=stop)
            else:
                runs.append(Run(piece.tensor, piece.start, stop))
            inside.append(LeafShard(number[piece.leaf], piece.offset, len(runs) - 1, piece.start - runs[-1].start, piece.numel))
        before = piece
    return tuple(runs), tuple(inside)


def find(parts: LeafMap, where: str | Callable[[str], bool], what: str) -> set[int]:
    """The leaves whose path matches a regular expression, or satisfies a function.

    Raises:
        ValueError: it is no regular expression, or matches no path; the message names the nearest.
    """
    if callable(where):
        return {i for i, leaf in enumerate(parts.leaves) if where(leaf.path)}
    try:
        pattern = re.compile(where)
    except re.error as error:
        raise ValueError(f"{what}={where!r} is no regular expression: {error}") from None
    hits = {i for i, leaf in enumerate(parts.leaves) if pattern.search(leaf.path)}
    paths = [*(leaf.path for leaf in parts.leaves), *parts.elsewhere]
    if not any(map(pattern.search, paths)):
        near = difflib.get_close_matches(where, paths, 1, 0.0)
        raise ValueError(f"{what}={where!r} matches no trained leaf; the nearest path is {near[0] if near else 'none'!r}")
    return hits
