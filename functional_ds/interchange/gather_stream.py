"""Leaves that lie in pieces on many ranks, brought to one rank a chunk at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import attrs
import torch
from torch import Tensor

from functional_ds import comm

__all__ = ["Held", "Hop", "Known", "agreed", "chunk_bytes", "stream"]

_SMALLEST_CHUNK, _LARGEST_CHUNK = 2**16, 2**22  # bytes; what is on the way at once is a few, however large the model


@attrs.frozen
class Known:
    """A leaf of the whole tree without its values.

    Attributes:
        place: where there are several values for a leaf, as masters beside what the loss sees: the lowest counts.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: int = 0

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


@attrs.frozen(eq=False)
class Held:
    """What a rank has of a leaf: its flattened elements from ``offset`` on; ``mark`` differs where values do."""

    leaf: Known
    offset: int
    values: Tensor
    mark: int = 0


@attrs.frozen
class Hop:
    """``numel`` elements of a leaf, from its element ``offset`` on, that rank ``src`` gives."""

    leaf: Known
    offset: int
    numel: int
    src: int


def agreed(held: Sequence[Held], group: comm.Group) -> tuple[tuple[Known, ...], tuple[Hop, ...]]:
    """All ranks' leaves, and who gives what so that rank 0 gets every element once; the same on every rank.

    Rank 0's own pieces come first, then longer ones, then lower ranks'. Leaves stand in the order of their paths, numbers by
    size, which does not depend on the ranks.

    Cost: each rank sends its pieces' names and sizes to all others.

    Raises:
        ValueError: ranks have a leaf in two shapes or dtypes, or with other values; elements that no rank has.
    """
    mine = [(piece.leaf, piece.offset, piece.values.numel(), piece.mark) for piece in held]
    everyones = comm.all_gather_object(mine, group) if group.size > 1 else [mine]
    leaves: dict[str, Known] = {}
    pieces: dict[Known, list[Hop]] = {}
    marks: dict[tuple[Known, int, int], int] = {}
    for rank, theirs in enumerate(everyones):
        for leaf, offset, numel, mark in theirs:
            first = leaves.setdefault(leaf.path, leaf)
            if first.shape != leaf.shape or (first.place == leaf.place and first.dtype != leaf.dtype):
                raise ValueError(f"rank {rank} of {group.name!r} has {_said(leaf)}, another rank {_said(first)}")
            if marks.setdefault((leaf, offset, numel), mark) != mark:
                raise ValueError(
                    f"rank {rank} of {group.name!r} has other values of {leaf.path!r} than another rank: slices of tensor "
                    "parallelism and ranks that step by themselves are not put together; export step.params(state) on one rank"
                )
            leaves[leaf.path] = min(first, leaf, key=lambda known: known.place)
            pieces.setdefault(leaf, []).append(Hop(leaf, offset, numel, rank))
    ordered = sorted(leaves.values(), key=lambda leaf: _natural(leaf.path))
    return tuple(ordered), tuple(hop for leaf in ordered for hop in _cover(leaf, pieces[leaf]))


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


def _said(leaf: Known) -> str:
    return f"{leaf.path!r} of shape {list(leaf.shape)} and {leaf.dtype}"


def _cover(leaf: Known, pieces: Sequence[Hop]) -> Iterator[Hop]:
    """Each element of the leaf once."""
    done = 0
    while done < leaf.numel:
        fitting = [piece for piece in pieces if piece.offset <= done < piece.offset + piece.numel]
        if not fitting:
            raise ValueError(
                f"no rank has element {done} of {_said(leaf)}: is the group the one that the state is spread over?"
            )
        best = min(fitting, key=lambda piece: (piece.src != 0, -(piece.offset + piece.numel), piece.src))
        end = best.offset + best.numel
        yield Hop(leaf, done, end - done, best.src)
        done = end


def chunk_bytes(leaves: Iterable[Known]) -> int:
    """How much travels at once: with what transports keep, a few of it, which is less than two of the largest leaf.

    Models of toy size need more than that.
    """
    largest = max((leaf.numel * leaf.dtype.itemsize for leaf in leaves), default=0)
    return min(_LARGEST_CHUNK, max(_SMALLEST_CHUNK, largest // 8))


def stream(
    hops: Sequence[Hop],
    held: Sequence[Held],
    *,
    group: comm.Group,
    take: Callable[[Hop, Tensor], None],
    cast: Callable[[Known], torch.dtype],
    chunk: int,
) -> None:
    """Hands rank 0 every hop's values by ``take``, in order; the next one is on its way meanwhile.

    ``cast`` says in which dtype a leaf travels. Rank 0's own pieces are handed over as they are.

    Cost: ranks but 0 send what rank 0 lacks, once. Memory: on rank 0 about eight chunks, on others two.
    """
    own: dict[Known, list[Held]] = {}
    for piece in held:
        own.setdefault(piece.leaf, []).append(piece)
    parts = [part for hop in hops for part in _cut(hop, chunk // cast(hop.leaf).itemsize)]
    if group.rank:
        for part in parts:
            if part.src == group.rank:
                values = _mine(part, own).to(cast(part.leaf)).contiguous()
                comm.send(values.to(group.world.device), 0, group)
        return

    def asked(place: int) -> comm.Pending[Tensor] | None:
        """The values of a part that another rank has, under way."""
        if place >= len(parts) or parts[place].src == 0:
            return None
        part = parts[place]
        template = torch.zeros((), dtype=cast(part.leaf), device=group.world.device).expand(part.numel)
        return comm.irecv(template, part.src, group)

    ahead = asked(0)
    for place, part in enumerate(parts):
        coming, ahead = ahead, asked(place + 1)
        take(part, _mine(part, own) if coming is None else coming.wait())


def _cut(hop: Hop, numel: int) -> Iterator[Hop]:
    """A hop in parts; those that rank 0 has need no cutting, as they do not travel."""
    size = hop.numel if hop.src == 0 else max(1, numel)
    for start in range(0, hop.numel, max(1, size)):
        yield Hop(hop.leaf, hop.offset + start, min(size, hop.numel - start), hop.src)


def _mine(hop: Hop, own: dict[Known, list[Held]]) -> Tensor:
    for piece in own[hop.leaf]:
        start = hop.offset - piece.offset
        if start >= 0 and start + hop.numel <= piece.values.numel():
            return piece.values.reshape(-1)[start : start + hop.numel]
    raise ValueError(f"this rank does not have elements {hop.offset} to {hop.offset + hop.numel} of {hop.leaf.path!r}")
