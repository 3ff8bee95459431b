"""Permutations of ranks."""

from collections.abc import Iterable, Iterator


class Permutation:
    """A partial permutation of ranks as (source, destination) pairs, as in ``jax.lax.ppermute``; checked once, reusable.

    Each rank occurs at most once as a source and once as a destination. ``source[dst]`` and ``target[src]`` look a rank up.

    Raises:
        ValueError: a rank is negative, or occurs twice as a source or twice as a destination.
        TypeError: the elements are not pairs of integers.

    >>> ring = Permutation([(0, 1), (1, 2), (2, 0)])
    >>> ring.target[2], ring.source[2], ring.inverse.target[2]
    (0, 1, 1)
    """

    __slots__ = ("_hash", "_inverse", "pairs", "ranks", "source", "target")

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        try:
            self.pairs = tuple(sorted((int(src), int(dst)) for src, dst in pairs))
        except (TypeError, ValueError):
            raise TypeError(f"perm={pairs!r}: pairs (source, destination) of ranks are needed, as [(0, 1), (1, 0)]") from None
        self.target = dict(self.pairs)
        self.source = {dst: src for src, dst in self.pairs}
        for side, peers in (("source", self.target), ("destination", self.source)):
            if len(peers) < len(self.pairs):
                named = [pair[side == "destination"] for pair in self.pairs]
                twice = next(rank for rank in named if named.count(rank) > 1)
                raise ValueError(
                    f"perm names rank {twice} twice as a {side}: {list(self.pairs)}; a rank has at most one of each"
                )
        if any(rank < 0 for pair in self.pairs for rank in pair):
            raise ValueError(f"perm={list(self.pairs)} names a negative rank; ranks count from 0")
        self.ranks = max((max(pair) for pair in self.pairs), default=-1) + 1  # the size of the smallest group with them all
        self._hash = hash(self.pairs)
        self._inverse: Permutation | None = None

    @classmethod
    def shift(cls, n: int, by: int = 1) -> "Permutation":
        """A ring of n ranks: rank r sends to rank ``(r + by) % n``."""
        return cls((rank, (rank + by) % n) for rank in range(n))

    @property
    def inverse(self) -> "Permutation":
        """The permutation with sources and destinations swapped."""
        if self._inverse is None:
            self._inverse = Permutation((dst, src) for src, dst in self.pairs)
            self._inverse._inverse = self
        return self._inverse

    def then(self, after: "Permutation") -> "Permutation":
        """The composition, this permutation first: ``PM(after) ∘ PM(self) = PM(self.then(after))``."""
        return Permutation((src, after.target[dst]) for src, dst in self.pairs if dst in after.target)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Permutation) and self.pairs == other.pairs)

    def __hash__(self) -> int:
        return self._hash

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.pairs)

    def __repr__(self) -> str:
        if len(self.pairs) <= 8:
            return repr(list(self.pairs))
        first = ", ".join(map(repr, self.pairs[:3]))
        return f"[{first}, ... {len(self.pairs)} pairs]"

    def __reduce__(self) -> tuple[type["Permutation"], tuple[tuple[tuple[int, int], ...]]]:
        return Permutation, (self.pairs,)
