"""How a sequence's positions are distributed over ranks, as data: a permutation, split into equal pieces."""

import math
from collections.abc import Sequence
from functools import lru_cache

import attrs
import torch
from torch import Tensor

_KINDS = ("contiguous", "zigzag", "striped", "per_document")


@attrs.frozen
class SequenceLayout:
    """Which positions of a sequence each rank holds: a permutation of positions, split into equal pieces.

    Loss, gradients and draws do not depend on the layout. Of P ranks, rank r of a sequence of N positions holds

    - contiguous: positions r N/P to (r + 1) N/P - 1. Causal attention reaches P / (2P - 1) of full efficiency, as the last rank
      works longest.
    - zigzag: the r-th and the (2P - 1 - r)-th of 2P chunks. Causal work is equal on all ranks in every step of a ring.
    - striped: positions r, r + P, r + 2P, ... Causal work differs by at most (P - 1) N/P pairs.
    - per_document: each document of a packed sequence in zigzag. The remainders of documents, less than 2P positions each, are
      concatenated and split in P.

    Attributes:
        kind: one of these names.
        documents: the documents' lengths in tokens, in order, for ``per_document``; attention stays within documents then.
        inner: how many neighbouring ranks share, in contiguous pieces, the positions of one rank of the layout. With Ulysses
            inside of a ring, the layout orders the ring's ranks, and Ulysses' ranks share them.

    Sources: zigzag from Megatron-LM's context parallelism; striped from Striped Attention (arXiv 2311.09431).

    >>> [SequenceLayout("zigzag").positions(8, 2, rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> [SequenceLayout("zigzag", inner=2).positions(8, 4, rank).tolist() for rank in range(4)]
    [[0, 1], [6, 7], [2, 3], [4, 5]]
    """

    kind: str = attrs.field(default="contiguous", validator=attrs.validators.in_(_KINDS))
    documents: tuple[int, ...] | None = attrs.field(default=None, kw_only=True)
    inner: int = attrs.field(default=1, kw_only=True, validator=attrs.validators.ge(1))

    def __attrs_post_init__(self) -> None:
        if (self.kind == "per_document") != (self.documents is not None):
            raise ValueError(f"layout {self.kind!r} with documents={self.documents!r}: the layout per_document takes lengths")
        if self.documents is not None and min(self.documents, default=0) < 1:
            raise ValueError(f"documents={self.documents!r}: a length is less than 1")

    @staticmethod
    def per_document(lengths: Sequence[int], *, inner: int = 1) -> "SequenceLayout":
        """The layout of a packed sequence with each document in zigzag; document lengths need not divide.

        >>> SequenceLayout.per_document([5, 3]).positions(8, 2, 0).tolist()
        [0, 3, 4, 5]
        """
        return SequenceLayout("per_document", documents=tuple(int(length) for length in lengths), inner=inner)

    @staticmethod
    def of(layout: "SequenceLayout | str") -> "SequenceLayout":
        """The layout of that name, or the layout itself."""
        return SequenceLayout(layout) if isinstance(layout, str) else layout

    def multiple(self, ranks: int) -> int:
        """What a length must be a multiple of, to split over so many ranks."""
        outer = ranks // self.inner
        return math.lcm(2 * outer if self.kind == "zigzag" else outer, ranks)

    def padding(self, length: int, ranks: int) -> int:
        """How many positions to append to a sequence of that length, so that it splits over so many ranks.

        >>> SequenceLayout("zigzag").padding(13, 4)
        3
        """
        return -length % self.multiple(ranks)

    def extended(self, padding: int) -> "SequenceLayout":
        """The layout with so many positions of padding, which become a document if the layout has documents."""
        if self.documents is None or padding == 0:
            return self
        return attrs.evolve(self, documents=(*self.documents, padding))

    def check(self, length: int, ranks: int) -> None:
        """Raises an error for lengths that do not split over so many ranks.

        Raises:
            ValueError: the length is not a multiple of ``multiple(ranks)``, the documents do not add up to it, or ``inner``
                does not divide the ranks.
        """
        if ranks % self.inner:
            raise ValueError(f"layout {self.kind!r} with inner={self.inner}: it does not divide the {ranks} ranks")
        if self.documents is not None and sum(self.documents) != length:
            raise ValueError(
                f"layout per_document has documents of {sum(self.documents)} positions together, and the sequence has {length}"
            )
        if length % self.multiple(ranks):
            raise ValueError(
                f"a sequence of {length} positions cannot be split over {ranks} ranks in layout {self.kind!r}: its length must "
                f"be a multiple of {self.multiple(ranks)}; append {self.padding(length, ranks)} positions of padding"
            )

    def runs(self, length: int, ranks: int, rank: int) -> tuple[range, ...]:
        """The rank's positions in its order, as ranges.

        Args:
            length: of the whole sequence.
            ranks: how many there are.
            rank: whose positions.

        Raises:
            ValueError: as ``check``.
        """
        self.check(length, ranks)
        return _runs(self, length, ranks, rank)

    def positions(self, length: int, ranks: int, rank: int, *, device: torch.device | str | None = None) -> Tensor:
        """The rank's positions in the whole sequence, int64 [length / ranks], in the order in which it holds them.

        Args:
            length: of the whole sequence.
            ranks: how many there are.
            rank: whose positions.
            device: where the tensor is made; the host does not wait.

        Raises:
            ValueError: as ``check``.
        """
        pieces = [
            torch.arange(run.start, run.stop, run.step, device=device, dtype=torch.int64)
            for run in self.runs(length, ranks, rank)
        ]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64, device=device)

    def order(self, length: int, ranks: int, *, device: torch.device | str | None = None) -> Tensor:
        """All ranks' positions, rank by rank: the layout's permutation.

        ``x.index_select(dim, order).chunk(ranks, dim)`` are the ranks' pieces of x.
        """
        return torch.cat([self.positions(length, ranks, rank, device=device) for rank in range(ranks)])

    def inverse(self, length: int, ranks: int, *, device: torch.device | str | None = None) -> Tensor:
        """The inverse of ``order``: ``torch.cat(pieces, dim).index_select(dim, inverse)`` is the whole sequence.

        >>> layout, x = SequenceLayout("striped"), torch.arange(6)
        >>> layout.order(6, 2)[layout.inverse(6, 2)].equal(x)
        True
        """
        order = self.order(length, ranks, device=device)
        return torch.empty_like(order).scatter_(0, order, torch.arange(length, device=device, dtype=torch.int64))


@lru_cache(maxsize=4096)
def _runs(layout: SequenceLayout, length: int, ranks: int, rank: int) -> tuple[range, ...]:
    outer = ranks // layout.inner
    whole = _outer_runs(layout, length, outer, rank // layout.inner)
    if layout.inner > 1:
        size = length // ranks
        start = rank % layout.inner * size
        whole = _cut(whole, start, start + size)
    return tuple(run for run in whole if len(run))


def _outer_runs(layout: SequenceLayout, length: int, n: int, rank: int) -> list[range]:
    if layout.kind == "contiguous":
        return [range(rank * length // n, (rank + 1) * length // n)]
    if layout.kind == "striped":
        return [range(rank, length, n)]
    if layout.kind == "zigzag":
        return _zigzag(0, length // (2 * n), n, rank)
    runs: list[range] = []
    rest: list[range] = []
    start = 0
    for size in layout.documents or ():
        chunk = size // (2 * n)
        runs += _zigzag(start, chunk, n, rank)
        rest.append(range(start + 2 * n * chunk, start + size))
        start += size
    share = sum(map(len, rest)) // n
    return sorted(runs + _cut(rest, rank * share, (rank + 1) * share), key=lambda run: run.start)


def _zigzag(start: int, chunk: int, n: int, rank: int) -> list[range]:
    return [range(start + i * chunk, start + (i + 1) * chunk) for i in (rank, 2 * n - 1 - rank)]


def _cut(pieces: Sequence[range], start: int, stop: int) -> list[range]:
    """The elements from the start-th to the stop-th of the ranges one after the other."""
    parts = []
    for run in pieces:
        parts.append(run[max(start, 0) : max(stop, 0)])
        start, stop = start - len(run), stop - len(run)
    return parts
