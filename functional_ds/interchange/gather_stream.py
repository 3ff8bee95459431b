"""Gathers sharded leaves on rank 0, one chunk at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import prod

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.sharding.leaf_region import LeafRegion, fault

_SMALLEST_CHUNK, _LARGEST_CHUNK = 2**16, 2**22  # bytes; a few chunks are in flight, for any size of model


@attrs.frozen
class LeafInfo:
    """A leaf of the whole tree without its values.

    Attributes:
        path: its path in the tree.
        shape: the whole leaf's.
        dtype: of its values.
        preference: of several values for a leaf, such as masters and the loss's params, the lowest is used.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    preference: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@attrs.frozen(eq=False)
class LocalShard:
    """This rank's part of a leaf.

    Attributes:
        leaf: the leaf.
        region: the rank's slice of it; all of it if no dim is split.
        offset: where the values begin in the flattened slice.
        values: the elements.
        fingerprint: differs between copies with different values.
    """

    leaf: LeafInfo
    region: LeafRegion
    offset: int
    values: Tensor = attrs.field(repr=False)
    fingerprint: int = 0


@attrs.frozen
class LeafSend:
    """Rank ``src`` sends ``numel`` elements of its slice of a leaf, from the slice's element ``offset`` on, to rank 0."""

    leaf: LeafInfo
    region: LeafRegion
    offset: int
    numel: int
    src: int


def plan_sends(shards: Sequence[LocalShard], group: comm.Group) -> tuple[tuple[LeafInfo, ...], tuple[LeafSend, ...]]:
    """All ranks' leaves, and the sends by which rank 0 gets every element once; the same on every rank. Collective.

    Rank 0's own elements are preferred, then longer shards, then lower ranks. Leaves are sorted by their paths, numbers in a
    path by value, so the order does not depend on the ranks.

    Cost: each rank sends its shards' names and sizes to all others.

    Raises:
        ValueError: ranks have a leaf in different shapes, dtypes or values; elements that no rank has; different slices that
            overlap.
    """
    mine = [(shard.leaf, shard.region, shard.offset, shard.values.numel(), shard.fingerprint) for shard in shards]
    everyones = comm.all_gather_object(mine, group) if group.size > 1 else [mine]
    leaves: dict[str, LeafInfo] = {}
    pieces: dict[LeafInfo, dict[LeafRegion, list[LeafSend]]] = {}
    fingerprints: dict[tuple[LeafInfo, LeafRegion, int, int], int] = {}
    for rank, theirs in enumerate(everyones):
        for leaf, region, offset, numel, fingerprint in theirs:
            first = leaves.setdefault(leaf.path, leaf)
            if first.shape != leaf.shape or (first.preference == leaf.preference and first.dtype != leaf.dtype):
                raise ValueError(f"rank {rank} of {group.name!r} has {_described(leaf)}, another rank {_described(first)}")
            if fingerprints.setdefault((leaf, region, offset, numel), fingerprint) != fingerprint:
                raise ValueError(
                    f"rank {rank} of {group.name!r} has other values of {leaf.path!r} than another rank: ranks that step by "
                    "themselves are not combined; export step.params(state) on one rank"
                )
            leaves[leaf.path] = min(first, leaf, key=lambda info: info.preference)
            sends = pieces.setdefault(leaf, {}).setdefault(region, [])
            sends.append(LeafSend(leaf, region, offset, numel, rank))
    ordered = sorted(leaves.values(), key=lambda leaf: _natural(leaf.path))
    wrong = cache(fault)  # most leaves of a model are sliced in one of a few ways
    for leaf in ordered:
        what = wrong(leaf.shape, tuple(pieces[leaf]))
        if what is not None:
            raise ValueError(
                f"the ranks have {what} of {_described(leaf)}: is the group the one that the state is spread over?"
            )
    return tuple(ordered), tuple(
        send for leaf in ordered for region, candidates in pieces[leaf].items() for send in _cover(leaf, region, candidates)
    )


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


def _described(leaf: LeafInfo) -> str:
    return f"{leaf.path!r} of shape {list(leaf.shape)} and {leaf.dtype}"


def _cover(leaf: LeafInfo, region: LeafRegion, pieces: Sequence[LeafSend]) -> Iterator[LeafSend]:
    """Sends that cover each element of a slice once."""
    done = 0
    while done < region.numel:
        fitting = [piece for piece in pieces if piece.offset <= done < piece.offset + piece.numel]
        if not fitting:
            raise ValueError(
                f"no rank has element {done} of {region} of {_described(leaf)}: is the group that of all ranks of the state?"
            )
        best = min(fitting, key=lambda piece: (piece.src != 0, -(piece.offset + piece.numel), piece.src))
        end = best.offset + best.numel
        yield LeafSend(leaf, region, done, end - done, best.src)
        done = end


def chunk_bytes(leaves: Iterable[LeafInfo]) -> int:
    """The bytes of one message. A few chunks, with transport buffers, are less than twice the largest leaf, except in tiny
    ones.
    """
    largest = max((leaf.numel * leaf.dtype.itemsize for leaf in leaves), default=0)
    return min(_LARGEST_CHUNK, max(_SMALLEST_CHUNK, largest // 8))


def stream(
    sends: Sequence[LeafSend],
    shards: Sequence[LocalShard],
    *,
    group: comm.Group,
    take: Callable[[LeafSend, Tensor], None],
    cast: Callable[[LeafInfo], torch.dtype],
    chunk: int,
) -> None:
    """Carries out the sends; rank 0 takes their values in order, while it receives the next. Collective.

    Args:
        sends: all of them, as ``plan_sends`` gives them.
        shards: this rank's.
        group: the ranks.
        take: called on rank 0 with each send and its values, its own elements in their own dtype.
        cast: the dtype in which a leaf is sent.
        chunk: bytes of a message.

    Cost: ranks other than 0 send what rank 0 lacks, once. Memory: about eight chunks on rank 0, two on others.
    """
    local: dict[tuple[LeafInfo, LeafRegion], list[LocalShard]] = {}
    for shard in shards:
        local.setdefault((shard.leaf, shard.region), []).append(shard)
    parts = [part for send in sends for part in _chunks(send, chunk // cast(send.leaf).itemsize)]
    if group.rank:
        for part in parts:
            if part.src == group.rank:
                values = _mine(part, local).to(cast(part.leaf)).contiguous()
                comm.send(values.to(group.world.device), 0, group)
        return

    def receive(index: int) -> comm.Pending[Tensor] | None:
        """Starts to receive a part; None for rank 0's own."""
        if index >= len(parts) or parts[index].src == 0:
            return None
        part = parts[index]
        template = torch.zeros((), dtype=cast(part.leaf), device=group.world.device).expand(part.numel)
        return comm.start(comm.recv, template, part.src, group)

    following = receive(0)
    for index, part in enumerate(parts):
        pending, following = following, receive(index + 1)
        take(part, _mine(part, local) if pending is None else pending.wait())


def _chunks(send: LeafSend, numel: int) -> Iterator[LeafSend]:
    """A send in parts of at most ``numel`` elements; rank 0's own elements stay in one part."""
    size = send.numel if send.src == 0 else max(1, numel)
    for start in range(0, send.numel, max(1, size)):
        yield attrs.evolve(send, offset=send.offset + start, numel=min(size, send.numel - start))


def _mine(send: LeafSend, local: dict[tuple[LeafInfo, LeafRegion], list[LocalShard]]) -> Tensor:
    for shard in local[send.leaf, send.region]:
        start = send.offset - shard.offset
        if start >= 0 and start + send.numel <= shard.values.numel():
            return shard.values.reshape(-1)[start : start + send.numel]
    raise ValueError(f"this rank does not have elements {send.offset} to {send.offset + send.numel} of {send.leaf.path!r}")
