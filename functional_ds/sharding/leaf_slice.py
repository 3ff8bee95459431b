"""Slices of leaves in tensor and expert parallelism: which positions along a dim each rank holds; index arithmetic only."""

import itertools
import math
from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds.base.marks import mark_slices, slices_of

Ranges = tuple[tuple[int, int], ...]


@attrs.frozen
class LeafSlice:
    """The positions along one dim of a leaf that each rank of a group holds.

    A rank's slice is the concatenation of its ranges. Ranks may hold the same ranges, such as a key-value head if there are
    fewer heads than ranks; then their gradients must be summed, and norms must count them once.

    Attributes:
        dim: the dim of the leaf.
        size: the size of the whole leaf along the dim.
        ranges_by_rank: each rank's (start, stop) ranges.
        rank: this rank's index in the group.
    """

    dim: int
    size: int
    ranges_by_rank: tuple[Ranges, ...]
    rank: int

    @staticmethod
    def even(dim: int, sizes: int | Sequence[int], n: int, rank: int) -> "LeafSlice":
        """Equal slices of a leaf or, given several sizes, of each of its blocks, as in packed projections.

        Args:
            dim: the dim of the leaf.
            sizes: the size of the whole leaf along the dim, or the sizes of the blocks in it, in order.
            n: the number of ranks.
            rank: this rank's index.

        Raises:
            ValueError: a size is not a multiple of n.

        >>> LeafSlice.even(0, [4, 2], 2, 1).ranges
        ((2, 4), (5, 6))
        """
        blocks = [sizes] if isinstance(sizes, int) else list(sizes)
        for size in blocks:
            if size % n:
                raise ValueError(f"sizes={sizes!r}: {size} along dim {dim} does not divide by the {n} ranks")
        starts = list(itertools.accumulate(blocks, initial=0))
        pairs = list(zip(starts[:-1], (size // n for size in blocks), strict=True))
        return LeafSlice(dim, starts[-1], tuple(tuple((s + r * m, s + (r + 1) * m) for s, m in pairs) for r in range(n)), rank)

    @staticmethod
    def heads(dim: int, count: int, width: int, n: int, rank: int) -> "LeafSlice":
        """Slices of whole heads: ``count / n`` heads per rank, or each head on ``n / count`` consecutive ranks.

        Args:
            dim: the dim of the leaf.
            count: the number of heads.
            width: the size of a head along the dim.
            n: the number of ranks.
            rank: this rank's index.

        Raises:
            ValueError: neither number is a multiple of the other.

        >>> LeafSlice.heads(0, 2, 8, 4, 3).ranges_by_rank
        (((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),))
        """
        if count % n and n % count:
            raise ValueError(f"heads: {count} heads along dim {dim} and {n} ranks: neither number divides by the other")
        if count % n == 0:
            return LeafSlice.even(dim, count * width, n, rank)
        ranks_per_head = n // count
        return LeafSlice(
            dim,
            count * width,
            tuple((((r // ranks_per_head) * width, (r // ranks_per_head + 1) * width),) for r in range(n)),
            rank,
        )

    @property
    def ranges(self) -> Ranges:
        """This rank's ranges."""
        return self.ranges_by_rank[self.rank]

    @property
    def sharers(self) -> tuple[int, ...]:
        """The ranks that hold the same slice as this rank, including it."""
        return tuple(r for r, ranges in enumerate(self.ranges_by_rank) if ranges == self.ranges)

    @property
    def first_holders(self) -> tuple[int, ...]:
        """The first rank of each set of sharers; their slices form the whole leaf."""
        first: dict[Ranges, int] = {}
        for rank, ranges in enumerate(self.ranges_by_rank):
            first.setdefault(ranges, rank)
        return tuple(first.values())

    def of(self, whole: Tensor) -> Tensor:
        """This rank's slice of a whole leaf; a copy if it has several ranges, else a view."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def whole(self, slices: Sequence[Tensor]) -> Tensor:
        """The whole leaf, from all ranks' slices in rank order."""
        pieces = [
            (start, piece)
            for rank in self.first_holders
            for (start, _), piece in zip(self.ranges_by_rank[rank], self._split(slices[rank], rank), strict=True)
        ]
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], self.dim)

    def _split(self, piece: Tensor, rank: int) -> tuple[Tensor, ...]:
        pieces: tuple[Tensor, ...] = piece.split([stop - start for start, stop in self.ranges_by_rank[rank]], self.dim)
        return pieces


def mark_slice(leaf: Tensor, cut: LeafSlice) -> Tensor:
    """A new tensor of the leaf's values, marked as a slice of a whole leaf along a further dim.

    Raises:
        ValueError: it is already a slice along this dim.
    """
    before: tuple[LeafSlice, ...] = slices_of(leaf)
    if any(earlier.dim == cut.dim for earlier in before):
        raise ValueError(
            f"a leaf of shape {list(leaf.shape)} is a slice along dim {cut.dim} already; let one transform split it"
        )
    return mark_slices(leaf, (*before, cut))


def whole_shape(shape: Sequence[int], slices: Sequence[LeafSlice]) -> tuple[int, ...]:
    """The shape of the whole leaf, from the shape of a slice."""
    sizes = {cut.dim: cut.size for cut in slices}
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def runs(shape: Sequence[int], slices: Sequence[LeafSlice], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The contiguous runs that elements ``start`` to ``stop`` of a flattened slice form in the flattened whole leaf.

    Args:
        shape: the shape of the slice.
        slices: the slice along each split dim.
        start: the first element.
        stop: the element after the last.

    Yields:
        (index in the flattened slice, index in the flattened whole leaf, number of elements).

    >>> list(runs((2, 2), [LeafSlice.even(1, 4, 2, 1)], 1, 4))
    [(1, 3, 1), (2, 6, 2)]
    """
    if not slices:
        if stop > start:
            yield start, start, stop - start
        return
    positions = {cut.dim: [p for first, last in cut.ranges for p in range(first, last)] for cut in slices}
    whole, last = whole_shape(shape, slices), max(positions)
    block = math.prod(shape[last + 1 :])  # contiguous in both: the dims after the last split one
    stretches = _stretches(next(cut for cut in slices if cut.dim == last).ranges, block)
    row = shape[last] * block
    strides = [math.prod(whole[dim + 1 :]) for dim in range(last)]
    for index in range(start // row, -(-stop // row)) if row else ():
        rest, target = index, 0
        for dim in reversed(range(last)):
            rest, at = divmod(rest, shape[dim])
            target += (positions[dim][at] if dim in positions else at) * strides[dim]
        for here, there, length in stretches:
            low, high = max(index * row + here, start), min(index * row + here + length, stop)
            if high > low:
                yield low, target + there + low - index * row - here, high - low


def _stretches(ranges: Ranges, block: int) -> list[tuple[int, int, int]]:
    """(index in a row of the slice, index in a row of the whole leaf, number of elements) of each range."""
    lengths = [(stop - start) * block for start, stop in ranges]
    places = itertools.accumulate(lengths, initial=0)
    return [(place, start * block, length) for place, (start, _), length in zip(places, ranges, lengths, strict=False)]
