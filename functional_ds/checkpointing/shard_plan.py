"""Which rank writes which elements of a checkpoint: each element once, from one of the ranks that have it."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from functional_ds.sharding.leaf_region import LeafRegion, fault
from functional_ds.state_dict.describe import TensorShard
from functional_ds.state_dict.errors import CheckpointError
from functional_ds.state_dict.fingerprint import SHORT, fingerprints
from functional_ds.state_dict.matching import per_rank_name

_SPLIT = 4 << 20  # bytes; larger copies are split among the ranks that have them


@attrs.frozen
class ShardMetadata:
    """A ``TensorShard`` without its values; ``fingerprint`` distinguishes copies with different values."""

    name: str
    region: LeafRegion
    dtype: str
    itemsize: int
    offset: int
    numel: int
    per_rank: bool
    fingerprint: int

    @property
    def stop(self) -> int:
        """Where it ends in the flattened slice."""
        return self.offset + self.numel


@attrs.frozen
class SaveRequest:
    """What a rank asks to save; rank 0's is used.

    Attributes:
        tag: the checkpoint's name.
        step: the number of updates.
        shards: the rank's shards.
        extra: the user's JSON values.
        staged: the hidden folder that the checkpoint is written into.
    """

    tag: str
    step: int
    shards: tuple[ShardMetadata, ...] = attrs.field(repr=False)
    extra: Any = None
    staged: Path = Path()


@attrs.frozen
class WriteTask:
    """What a rank writes: ``numel`` elements of its shard ``index``, as those of ``name``'s same slice from ``offset`` on."""

    name: str
    index: int
    offset: int
    numel: int


@attrs.frozen
class _Holder:
    """A rank that has a shard, as its shard ``index``."""

    rank: int
    index: int
    shard: ShardMetadata


@attrs.frozen
class _Range:
    """Elements ``low`` to ``high`` of a flattened slice, and the ranks that have them."""

    low: int
    high: int
    holders: tuple[_Holder, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return (self.high - self.low) * self.holders[0].shard.itemsize


def metadata_of(shards: Sequence[TensorShard]) -> list[ShardMetadata]:
    """What the other ranks need to know of this rank's shards.

    Long shards get no fingerprint yet: it reads every element, and few shards have copies.
    """
    short = [i for i, shard in enumerate(shards) if shard.view.numel() <= SHORT]
    known = dict(zip(short, fingerprints([shards[i].view for i in short]), strict=True))
    return [
        ShardMetadata(
            shard.name,
            shard.region,
            str(shard.view.dtype).removeprefix("torch."),
            shard.view.element_size(),
            shard.offset,
            shard.view.numel(),
            shard.per_rank,
            known.get(i, 0),
        )
        for i, shard in enumerate(shards)
    ]


def replicated(ranks: Sequence[Sequence[ShardMetadata]]) -> list[list[int]]:
    """For each rank the indices of its shards that have no fingerprint yet and that another rank has as well."""
    having: dict[tuple[str, LeafRegion, int, int], list[tuple[int, int]]] = {}
    for rank, shards in enumerate(ranks):
        for index, shard in enumerate(shards):
            if shard.numel > SHORT and not shard.per_rank:
                having.setdefault((shard.name, shard.region, shard.offset, shard.numel), []).append((rank, index))
    indices: list[list[int]] = [[] for _ in ranks]
    for rank, index in (pair for pairs in having.values() if len(pairs) > 1 for pair in pairs):
        indices[rank].append(index)
    return indices


def with_fingerprints(
    shards: Sequence[ShardMetadata], indices: Sequence[int], *, numbers: Sequence[int]
) -> list[ShardMetadata]:
    """A rank's shards, with the fingerprints that were computed for some of them.

    Args:
        shards: the rank's shards.
        indices: those of them that have new fingerprints.
        numbers: these fingerprints.
    """
    new = dict(zip(indices, numbers, strict=True))
    return [attrs.evolve(shard, fingerprint=new[i]) if i in new else shard for i, shard in enumerate(shards)]


def assign_writes(ranks: Sequence[Sequence[ShardMetadata]]) -> list[list[WriteTask]]:
    """What each rank writes, computed identically on every rank from the same metadata.

    Laws: the tasks for a tensor are disjoint and cover it; a rank writes only what it has. Ranks with the same slice have
    copies of its elements, which are assigned so that all ranks write about equally much. If copies differ (error feedback,
    ranks that make separate steps), each rank writes its copy under a separate name.

    Raises:
        CheckpointError: ranks have tensors of one name with different shapes or dtypes; no rank has some of the elements;
            different slices overlap.

    >>> both = ShardMetadata("a", LeafRegion((4,)), "uint8", 1, 0, 4, False, 7)
    >>> one = ShardMetadata("b", LeafRegion((2,)), "uint8", 1, 0, 2, False, 7)
    >>> [[task.name for task in tasks] for tasks in assign_writes([[both, one], [both]])]
    [['b'], ['a']]
    """
    tensors: dict[str, list[_Holder]] = {}
    for rank, shards in enumerate(ranks):
        for index, shard in enumerate(shards):
            tensors.setdefault(shard.name, []).append(_Holder(rank, index, shard))
    writes = _Writes([[] for _ in ranks], [0] * len(ranks))
    copied: list[_Range] = []
    wrong = cache(fault)  # most leaves of a model are sliced in one of a few ways
    for name, holders in tensors.items():
        _check_agreement(name, holders)
        if _differ(holders):
            for holder in holders:
                writes.add(holder, holder.shard.offset, holder.shard.stop, name=per_rank_name(name, holder.rank))
            continue
        slices: dict[LeafRegion, list[_Holder]] = {}
        for holder in holders:
            slices.setdefault(holder.shard.region, []).append(holder)
        damage = wrong(holders[0].shard.region.shape, tuple(slices))
        if damage is not None:
            raise CheckpointError(f"the ranks have {damage} of {name}; call save on all ranks of the state")
        for region, sharers in slices.items():
            for run in _ranges(name, region, sharers):
                if len(run.holders) == 1:
                    writes.add(run.holders[0], run.low, run.high)
                else:
                    copied.append(run)
    for run in sorted(copied, key=lambda run: -run.nbytes):
        writes.share(run)
    return [sorted(written, key=lambda task: (task.index, task.offset)) for written in writes.tasks]


@attrs.frozen
class _Writes:
    """The tasks that are assigned so far, and each rank's bytes."""

    tasks: list[list[WriteTask]]
    nbytes: list[int]

    def add(self, holder: _Holder, low: int, high: int, *, name: str | None = None) -> None:
        """A rank writes elements of a tensor, perhaps under another name."""
        self.tasks[holder.rank].append(WriteTask(name or holder.shard.name, holder.index, low, high - low))
        self.nbytes[holder.rank] += (high - low) * holder.shard.itemsize

    def share(self, run: _Range) -> None:
        """Assigns copies: large ones in equal parts to all that have them, else to the rank with the fewest bytes."""
        if run.nbytes < _SPLIT:
            self.add(min(run.holders, key=lambda holder: (self.nbytes[holder.rank], holder.rank)), run.low, run.high)
            return
        part = -(-(run.high - run.low) // len(run.holders))
        for i, holder in enumerate(run.holders):
            low, high = run.low + i * part, min(run.high, run.low + (i + 1) * part)
            if low < high:
                self.add(holder, low, high)


def _check_agreement(name: str, holders: Sequence[_Holder]) -> None:
    first = holders[0]
    for holder in holders:
        one, other = holder.shard, first.shard
        if (one.region.shape, one.dtype) != (other.region.shape, other.dtype):
            raise CheckpointError(
                f"{name} is {one.dtype}{list(one.region.shape)} on rank {holder.rank} and {other.dtype}"
                f"{list(other.region.shape)} on rank {first.rank}; is this the state of one step on all ranks?"
            )


def _differ(holders: Sequence[_Holder]) -> bool:
    """Whether ranks have different values for the same elements."""
    seen: dict[tuple[LeafRegion, int, int], int] = {}
    return any(
        shard.per_rank or seen.setdefault((shard.region, shard.offset, shard.numel), shard.fingerprint) != shard.fingerprint
        for shard in (holder.shard for holder in holders)
    )


def _ranges(name: str, region: LeafRegion, holders: Sequence[_Holder]) -> list[_Range]:
    """Neighbouring ranges from a slice's beginning to its end, each with the ranks that have it."""
    total = region.numel
    if not total:
        return [_Range(0, 0, tuple(holders))]
    waiting = sorted((holder for holder in holders if holder.shard.numel), key=lambda holder: holder.shard.offset)
    edges = sorted({edge for holder in waiting for edge in (holder.shard.offset, holder.shard.stop)} | {0, total})
    ranges, active, next_ = [], list[_Holder](), 0
    for low, high in pairwise(edges):
        while next_ < len(waiting) and waiting[next_].shard.offset <= low:
            active.append(waiting[next_])
            next_ += 1
        active = [holder for holder in active if holder.shard.stop > low]
        if not active:
            where = f"the slice {region} of {name}" if region.ranges else name
            raise CheckpointError(f"no rank has the elements {low} to {high} of {where}; call save on all ranks of the state")
        ranges.append(_Range(low, high, tuple(active)))
    return ranges
