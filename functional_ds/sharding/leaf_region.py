"""Regions of leaves that slices cover, and the boxes that ranges of their elements form: index arithmetic only.

A rank has a range of the flattened slice. In the whole leaf its elements are contiguous only if the slice is along the first
dim, but they always form a few boxes: whole rows, and parts of the rows before and after.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import attrs
import numpy as np
from torch import Tensor

from .leaf_slice import LeafSlice, Ranges, whole_shape

_CELLS = 1 << 24  # more than any practical slicing has, and small enough for memory


@attrs.frozen
class Box:
    """A box of a tensor (a range along every dim), and its position in a flat tensor.

    Attributes:
        start: its first position along each dim.
        shape: its size along each dim.
        place: the index of its first element in the flat tensor.
        strides: its strides in the flat tensor.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    place: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def dense(self) -> bool:
        """Whether its elements are contiguous in the flat tensor."""
        return self.numel == self.extent

    @property
    def extent(self) -> int:
        """The number of elements of the flat tensor from its first to its last."""
        return _extent(self.shape, self.strides)

    def view(self, flat: Tensor, first: int = 0) -> Tensor:
        """The box as a view of a flat tensor that starts at element ``first``."""
        return flat.as_strided(self.shape, self.strides, int(flat.storage_offset()) + self.place - first)

    def part(self, low: Sequence[int], size: Sequence[int]) -> "Box":
        """The sub-box of size ``size`` that starts at ``low``, relative to the box."""
        start = tuple(a + b for a, b in zip(self.start, low, strict=True))
        place = self.place + sum(a * b for a, b in zip(low, self.strides, strict=True))
        return Box(start, tuple(size), place, self.strides)

    def in_whole(self, shape: Sequence[int]) -> "Box":
        """The same box, with its position in the flattened whole tensor of this shape."""
        strides = _strides(shape)
        return Box(self.start, self.shape, sum(a * b for a, b in zip(self.start, strides, strict=True)), strides)


@attrs.frozen
class LeafRegion:
    """The region of a whole leaf that a slice covers: ranges along some dims, and all of the others.

    Its elements are numbered as in the flattened slice. Equal slices have equal regions.

    Attributes:
        shape: the shape of the whole leaf.
        ranges: the split dims, in order, with (start, stop) ranges along each; empty for the whole leaf.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, Ranges], ...] = ()

    @staticmethod
    def of(shape: Sequence[int], slices: Sequence[LeafSlice]) -> "LeafRegion":
        """The region of a rank's leaf.

        Args:
            shape: the shape of the slice.
            slices: the slice along each split dim.

        >>> LeafRegion.of((2, 3), [LeafSlice.even(1, 6, 2, 1)])
        LeafRegion(shape=(2, 6), ranges=((1, ((3, 6),)),))
        """
        whole = whole_shape(shape, slices)
        cuts = ((cut.dim, _merged(cut.ranges)) for cut in sorted(slices, key=lambda cut: cut.dim))
        return LeafRegion(whole, tuple((dim, ranges) for dim, ranges in cuts if ranges != ((0, whole[dim]),)))

    @property
    def dims(self) -> tuple[int, ...]:
        """The split dims."""
        return tuple(dim for dim, _ in self.ranges)

    @property
    def numel(self) -> int:
        """The number of its elements."""
        cut = {dim: sum(stop - start for start, stop in ranges) for dim, ranges in self.ranges}
        return math.prod(cut.get(dim, size) for dim, size in enumerate(self.shape))

    def with_pairs(self) -> "LeafRegion":
        """The region with a last dim of size 2 appended, for pairs of numbers."""
        return LeafRegion((*self.shape, 2), self.ranges)

    def __str__(self) -> str:
        cut = dict(self.ranges)
        shown = [" and ".join(f"{a}:{b}" for a, b in cut[dim]) if dim in cut else ":" for dim in range(len(self.shape))]
        return f"[{', '.join(shown)}]"

    def check(self) -> None:
        """Raises ValueError unless dims are distinct and in order, and their ranges are within the leaf and disjoint."""
        if any(dim >= len(self.shape) for dim in self.dims) or list(self.dims) != sorted(set(self.dims)):
            raise ValueError(f"the dims {self.dims} of a slice are not dims of {list(self.shape)}, in order")
        for dim, ranges in self.ranges:
            ordered = sorted(ranges)
            edges = [0, *(edge for pair in ordered for edge in pair), self.shape[dim]]
            if edges != sorted(edges) or any(start == stop for start, stop in ordered):
                raise ValueError(f"{list(ranges)} are not ranges of the {self.shape[dim]} positions along dim {dim}")

    def boxes(self, start: int, stop: int, dims: Sequence[int]) -> Iterator[Box]:
        """The boxes that elements ``start`` to ``stop`` form, with their positions among the region's elements.

        Args:
            start: the first element.
            stop: the element after the last.
            dims: the dims to distinguish, which include the split ones; the others are merged, see ``grouped``.

        >>> region = LeafRegion((4, 6), ((1, ((3, 6),)),))
        >>> [(box.start, box.shape, box.place) for box in region.boxes(1, 12, (1,))]
        [((0, 4), (1, 2), 1), ((1, 3), (3, 3), 3)]
        """
        if not dims:  # one range
            if stop > start:
                yield Box((start,), (stop - start,), start, (1,))
            return
        ranges = self._grouped_ranges(dims)
        sizes = [sum(last - first for first, last in dim_ranges) for dim_ranges in ranges]
        strides = _strides(sizes)
        for low, size in _blocks(sizes, start, stop):
            along = [list(_pieces(dim_ranges, a, a + n)) for dim_ranges, a, n in zip(ranges, low, size, strict=True)]
            for corner in itertools.product(*along):
                place = sum(here * stride for (here, _, _), stride in zip(corner, strides, strict=True))
                yield Box(tuple(there for _, there, _ in corner), tuple(n for _, _, n in corner), place, strides)

    def bounds(self, start: int, stop: int, dims: Sequence[int]) -> list[tuple[int, int]]:
        """Bounds of these elements along each dim; faster than the boxes, and sometimes too wide."""
        if not dims:
            return [(start, stop) if stop > start else (0, 0)]
        ranges = self._grouped_ranges(dims)
        row = math.prod(sum(last - first for first, last in dim_ranges) for dim_ranges in ranges[1:])
        rows = list(_pieces(ranges[0], start // row, -(-stop // row))) if row and stop > start else []
        wide = [
            (min((a for a, _ in dim_ranges), default=0), max((b for _, b in dim_ranges), default=0)) for dim_ranges in ranges
        ]
        return [(min((a for _, a, _ in rows), default=0), max((a + n for _, a, n in rows), default=0)), *wide[1:]]

    def _grouped_ranges(self, dims: Sequence[int]) -> list[Ranges]:
        cut, ranges = dict(self.ranges), []
        for (first, stop), size in zip(_groups(self.shape, dims), grouped(self.shape, dims), strict=True):
            width = math.prod(self.shape[first + 1 : stop])
            ranges.append(tuple((a * width, b * width) for a, b in cut[first]) if first in cut else ((0, size),))
        return ranges


def grouped(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """The shape with dims merged: each of ``dims`` with the dims after it, and the dims before the first.

    >>> grouped((2, 3, 4, 5), (1,)), grouped((2, 3, 4, 5), ())
    ((2, 60), (120,))
    """
    return tuple(math.prod(shape[first:stop]) for first, stop in _groups(shape, dims))


def fault(shape: Sequence[int], regions: Iterable[LeafRegion]) -> str | None:
    """Checks that regions cover a whole leaf, each element once; returns the error, or None.

    >>> left, right = (LeafRegion((2, 6), ((1, (each,)),)) for each in ((0, 3), (3, 6)))
    >>> fault((2, 6), [left, right]), fault((2, 6), [left])
    (None, 'nothing at [:, 3:6]')
    """
    distinct = list(dict.fromkeys(regions))
    dims = sorted({dim for region in distinct for dim in region.dims})
    inside = {dim: [r for region in distinct for r in dict(region.ranges).get(dim, ())] for dim in dims}
    edges = [sorted({0, shape[dim], *itertools.chain(*inside[dim])}) for dim in dims]
    if math.prod(map(len, edges)) > _CELLS:
        return f"slices with {math.prod(map(len, edges))} edges"
    number = [{edge: i for i, edge in enumerate(dim_edges)} for dim_edges in edges]
    count = np.zeros([len(dim_edges) - 1 for dim_edges in edges], dtype=np.int32)
    for region in distinct:
        cut = dict(region.ranges)
        cells = []
        for dim, places in zip(dims, number, strict=True):
            pieces = cut.get(dim, ((0, shape[dim]),))
            cells.append([i for start, stop in pieces for i in range(places[start], places[stop])])
        count[np.ix_(*cells) if cells else ()] += 1
    wrong = np.argwhere(count != 1)
    if not len(wrong):
        return None
    where = tuple((dim, ((dim_edges[i], dim_edges[i + 1]),)) for dim, dim_edges, i in zip(dims, edges, wrong[0], strict=True))
    place = str(LeafRegion(tuple(shape), where))
    return f"nothing at {place}" if not count[tuple(wrong[0])] else f"slices that overlap at {place}"


def stretches(box: Box, *, gap: int, most: int) -> Iterator[Box]:
    """Splits a box into parts that are nearly contiguous in the flat tensor, so that each can be read at once.

    Args:
        box: any box.
        gap: how many other elements may be between two elements of a part.
        most: the largest extent of a part.

    >>> box = Box((0, 0), (4, 2), 0, (6, 1))
    >>> [part.shape for part in stretches(box, gap=4, most=9)], [part.shape for part in stretches(box, gap=3, most=9)]
    ([(2, 2), (2, 2)], [(1, 2), (1, 2), (1, 2), (1, 2)])
    """
    for low, size in _stretches(box.shape, box.strides, gap, most):
        yield box.part(low, size)


_Part = tuple[tuple[int, ...], tuple[int, ...]]


def _stretches(shape: tuple[int, ...], strides: tuple[int, ...], gap: int, most: int) -> Iterator[_Part]:
    if not shape:
        yield (), ()
        return
    count, step = shape[0], strides[0]
    inner = list(_stretches(shape[1:], strides[1:], gap, most))
    reach = _extent(shape[1:], strides[1:])
    if len(inner) == 1 and step - reach <= gap:
        rows = max(1, (most - reach) // step + 1)
        for row in range(0, count, rows):
            yield (row, *inner[0][0]), (min(rows, count - row), *inner[0][1])
        return
    for row in range(count):
        yield from (((row, *low), (1, *size)) for low, size in inner)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _groups(shape: Sequence[int], dims: Sequence[int]) -> list[tuple[int, int]]:
    """The first dim of each group, and the dim after its last."""
    edges = [0, *sorted(dim for dim in dims if dim), len(shape)]
    return list(itertools.pairwise(edges)) if shape else [(0, 0)]


def _merged(ranges: Ranges) -> Ranges:
    """The ranges, with adjacent ones joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _blocks(shape: Sequence[int], start: int, stop: int) -> Iterator[_Part]:
    """The boxes, as (first position, size), that elements ``start`` to ``stop`` of a tensor of this shape form, in order."""
    if stop <= start:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if head:
        end = row if last > first else tail
        yield from (((first, *low), (1, *size)) for low, size in _blocks(shape[1:], head, end))
        if last == first:
            return
        first += 1
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from (((last, *low), (1, *size)) for low, size in _blocks(shape[1:], 0, tail))


def _pieces(ranges: Ranges, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """(position in the slice, position in the whole, count) for the slice's positions ``low`` to ``high``."""
    done = 0
    for start, stop in ranges:
        first, last = max(low, done), min(high, done + stop - start)
        if last > first:
            yield first, start + first - done, last - first
        done += stop - start
