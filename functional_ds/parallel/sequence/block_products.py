"""Which products of query rows and key columns an attention needs, as data: fully masked blocks are omitted.

Positions are ranges, so the host computes everything from sizes, without a mask of a whole sequence.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import attrs

from .sequence_layout import SequenceLayout

Extent = tuple[int, int]
_WINDOW_ROWS = 256


@attrs.frozen
class BlockProduct:
    """One product: rows of queries by columns of keys.

    Attributes:
        rows: the half-open range of rows, as the rank holds them.
        cols: the same of the keys.
        kind: "full", all pairs; "causal", the i-th row by the columns up to the i-th; "masked", pairs that positions allow.

    >>> BlockProduct((0, 4), (4, 8), "full").pairs, BlockProduct((0, 4), (4, 8), "causal").pairs
    (16, 10)
    """

    rows: Extent
    cols: Extent
    kind: str

    @property
    def pairs(self) -> int:
        """The pairs that are computed."""
        n = self.rows[1] - self.rows[0]
        return n * (n + 1) // 2 if self.kind == "causal" else n * (self.cols[1] - self.cols[0])

    def tiles(self, elements: int) -> "Iterator[BlockProduct]":
        """The same pairs in tiles of at most so many elements, with a mask if it was causal."""
        (start, stop), (first, last) = self.rows, self.cols
        size = max(elements // max(last - first, 1), 16)
        for row in range(start, stop, size):
            end = min(row + size, stop)
            if self.kind == "causal":
                yield BlockProduct((row, end), (first, first + end - start), "masked")
            else:
                yield BlockProduct((row, end), self.cols, self.kind)


@attrs.frozen
class _Run:
    """Consecutive rows or columns, with their positions and the number of their document."""

    start: int
    positions: range
    document: int

    @property
    def extent(self) -> Extent:
        return self.start, self.start + len(self.positions)


@lru_cache(maxsize=4096)
def products(
    rows: tuple[range, ...],
    cols: tuple[range, ...],
    *,
    causal: bool,
    window: int | None = None,
    documents: tuple[int, ...] | None = None,
) -> tuple[BlockProduct, ...]:
    """The products that attention of these rows to these columns needs, each pair once.

    Args:
        rows: the queries' positions, in the order in which they are held.
        cols: the keys' positions.
        causal: whether a position attends only to itself and earlier ones.
        window: to how many positions it attends, itself included; only with ``causal``.
        documents: lengths of documents, within which attention stays; None for one.

    >>> products((range(4, 8),), (range(0, 8),), causal=True)
    (BlockProduct(rows=(0, 4), cols=(0, 4), kind='full'), BlockProduct(rows=(0, 4), cols=(4, 8), kind='causal'))
    """
    blocks: list[BlockProduct] = []
    left, right = _by_document(rows, documents), _by_document(cols, documents)
    for document, queries in left.items():
        keys = right.get(document, [])
        ordered = all(a.positions[-1] < b.positions[0] for a, b in itertools.pairwise(queries))
        if causal and window is None and [q.positions for q in queries] == [k.positions for k in keys] and ordered:
            blocks.append(BlockProduct(_span(queries), _span(keys), "causal"))
            continue
        for query, key in itertools.product(queries, keys):
            blocks += _pair(query, key, causal, window)
    return tuple(_merged(blocks))


def ring_pairs(layout: SequenceLayout | str, length: int, *, ranks: int, causal: bool = True) -> list[list[int]]:
    """How many query-key pairs each rank computes in each step of a ring: a list of steps, each with all ranks.

    Law: with zigzag all ranks of a causal ring are equal in every step.

    Args:
        layout: or its name.
        length: of the sequence.
        ranks: of the ring.
        causal: whether attention is.

    >>> ring_pairs("zigzag", 8, ranks=2), ring_pairs("contiguous", 8, ranks=2)
    ([[10, 10], [8, 8]], [[10, 10], [0, 16]])
    """
    layout = SequenceLayout.of(layout)
    runs = [layout.runs(length, ranks, rank) for rank in range(ranks)]
    return [
        [
            sum(product.pairs for product in products(runs[rank], runs[rank - step], causal=causal, documents=layout.documents))
            for rank in range(ranks)
        ]
        for step in range(ranks)
    ]


def _by_document(runs: Sequence[range], documents: tuple[int, ...] | None) -> dict[int, list[_Run]]:
    by_document: dict[int, list[_Run]] = {}
    ends = [] if documents is None else list(itertools.accumulate(documents))
    start = 0
    for run in runs:
        for document, part in _parts(run, ends):
            by_document.setdefault(document, []).append(_Run(start, part, document))
            start += len(part)
    return by_document


def _parts(run: range, ends: Sequence[int]) -> Iterator[tuple[int, range]]:
    """The run's parts in each document."""
    if not ends:
        yield 0, run
        return
    begin, document = 0, bisect.bisect_right(ends, run[0])
    while begin < len(run):
        stop = _count_below(run, ends[document])
        if stop > begin:
            yield document, run[begin:stop]
        begin, document = stop, document + 1


def _count_below(run: range, end: int) -> int:
    """How many elements of an ascending range are less than ``end``."""
    return min(max(-((run.start - end) // run.step), 0), len(run))


def _span(runs: Sequence[_Run]) -> Extent:
    return runs[0].extent[0], runs[-1].extent[1]


def _pair(query: _Run, key: _Run, causal: bool, window: int | None) -> list[BlockProduct]:
    q, k = query.positions, key.positions
    if (causal and k[0] > q[-1]) or (window is not None and q[0] - k[-1] >= window):
        return []
    if window is not None and q[-1] - k[0] >= window:
        return _windowed(query, key, window)
    if not causal or k[-1] <= q[0]:
        return [BlockProduct(query.extent, key.extent, "full")]
    step = k.step if len(k) > 1 else q.step
    if q.step != step and len(q) > 1:
        return [BlockProduct(query.extent, key.extent, "masked")]
    # Row i may see the columns up to i + ahead: on the left of a square a rectangle, then the square, below it the rest.
    ahead = (q[0] - k[0]) // step
    low, high = max(ahead, 0), min(ahead + len(q), len(k))
    (row, last_row), (col, _) = query.extent, key.extent
    square_rows = row + low - ahead, row + high - ahead
    blocks = [
        BlockProduct(query.extent, (col, col + min(low, len(k))), "full"),
        BlockProduct(square_rows, (col + low, col + high), "causal"),
        BlockProduct((square_rows[1], last_row), (col + low, col + high), "full"),
    ]
    return [block for block in blocks if block.rows[0] < block.rows[1] and block.cols[0] < block.cols[1]]


def _windowed(query: _Run, key: _Run, window: int) -> list[BlockProduct]:
    blocks = []
    for row in range(0, len(query.positions), _WINDOW_ROWS):
        part = query.positions[row : row + _WINDOW_ROWS]
        first, last = _count_below(key.positions, part[0] - window + 1), _count_below(key.positions, part[-1] + 1)
        if first < last:
            rows = query.start + row, query.start + row + len(part)
            blocks.append(BlockProduct(rows, (key.start + first, key.start + last), "masked"))
    return blocks


def _merged(blocks: Sequence[BlockProduct]) -> list[BlockProduct]:
    """Joins adjacent full products, first side by side, then one above the other."""
    merged: list[BlockProduct] = []
    for block in blocks:
        before = merged[-1] if merged else None
        if before and before.kind == block.kind == "full" and before.rows == block.rows and before.cols[1] == block.cols[0]:
            merged[-1] = BlockProduct(block.rows, (before.cols[0], block.cols[1]), "full")
        else:
            merged.append(block)
    above: list[BlockProduct] = []
    for block in merged:
        match = next(
            (b for b in above if b.kind == block.kind == "full" and b.cols == block.cols and b.rows[1] == block.rows[0]), None
        )
        if match:
            above[above.index(match)] = BlockProduct((match.rows[0], block.rows[1]), block.cols, "full")
        else:
            above.append(block)
    return above
