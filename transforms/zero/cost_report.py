"""The bytes that a configuration of ZeRO will store and send, computed from shapes."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import torch

from functional_ds import comm
from functional_ds.comm.backends.reduction import chunk_bounds
from functional_ds.comm.codecs.compressed import Compressed, encode_leaf
from functional_ds.sharding.layout import Layout, Segment
from functional_ds.sharding.leaf_region import LeafRegion

from .config import ZeroConfig

__all__ = ["CostReport", "report_costs"]


@attrs.frozen
class _Level:
    """A group's name and size."""

    name: str
    size: int


@attrs.frozen(repr=False)
class CostReport:
    """What a configuration makes of given params; as text, a few lines.

    Attributes:
        config: the arguments of ``zero``.
        layout: units, segments and shards.
        group: the ranks that shard the state.
        levels: the groups of a gather, in order; a reduction takes them in reverse order.
        replicas: the group over which shards are replicated.
        stored_dtype: the dtype in which floating leaves are stored; None for their own.
        comm_dtype: the dtype in which their gradients are sent; None for the stored one.
    """

    config: ZeroConfig
    layout: Layout
    group: _Level
    levels: tuple[_Level, ...]
    replicas: _Level | None
    stored_dtype: torch.dtype | None = None
    comm_dtype: torch.dtype | None = None

    def __repr__(self) -> str:
        return f"CostReport({self.config}, {self.layout})"

    @property
    def whole(self) -> list[Segment]:
        """The segments whose params are whole between steps."""
        return [s for s in self.layout.segments if self.config.stays_whole(s)]

    @property
    def sharded(self) -> list[Segment]:
        """The segments whose params are in shards between steps."""
        return [s for s in self.layout.segments if not self.config.stays_whole(s)]

    def held(self, rank: int = 0) -> int:
        """Bytes of params that a rank stores, exact shards beside compressed params included."""
        whole = sum(s.size * self._itemsize(s) for s in self.whole)
        sharded = sum(self._own(s, rank) * self._itemsize(s) for s in self.sharded)
        beside = self.config.inexact and self.config.stage and self.layout.n > 1
        exact = sum(self._own(s, rank) * self._itemsize(s) for s in self.whole if not s.alone) if beside else 0
        return whole + sharded + exact

    def fetched(self) -> int:
        """Bytes of the units that stage 3 has whole or in flight at once, at most: its largest ones."""
        sizes = [
            sum(s.size * self._itemsize(s) for s in self._of(unit) if not (s.persistent or s.alone))
            for unit in range(len(self.layout.units))
        ]
        most = sorted(sizes, reverse=True)[: self.config.max_live_units + self.config.prefetch]
        return sum(most) if self.config.stage == 3 and self.layout.n > 1 else 0

    def hpz_bytes(self) -> int:
        """Bytes of the secondary shards that ``hpz`` keeps from the forward pass to the end of the backward."""
        if not self.config.hpz or len(self.levels) < 2:
            return 0
        return self.levels[0].size * sum(self._payload(s, s.shard) for s in self.sharded if s.sharers is None)

    def sent(self, *, micro_batches: int = 1, rank: int = 0, replica: int = 0) -> dict[tuple[str, str], int]:
        """Bytes that a rank sends in a step, by collective and group, as a ledger names them.

        These are params and gradients. Scalars, the optimizer's messages and the ranks' agreements are not counted. Stage 3 is
        taken to use every unit once in the forward and once in the backward pass; without ``reshard_last_units`` it gathers up
        to ``max_live_units`` units fewer in each micro-batch.

        Args:
            micro_batches: how many the step has.
            rank: whose shard.
            replica: which replica.
        """
        sent: Counter[tuple[str, str]] = Counter()
        each = micro_batches if self.config.stage >= 2 else 1
        for segment in self.sharded:
            self._gather(sent, segment, rank, micro_batches, inter_node=1 if self.config.hpz else 2)
        for segment in self.whole if self.config.stage else []:
            if segment.trainable:
                self._gather(sent, segment, rank, 1, inter_node=1, intra_node=1)
        for segment in self.layout.segments:
            if segment.trainable:
                self._reduce(sent, segment, rank, replica, each, grown=micro_batches > 1)
        return {key: size for key, size in sent.items() if size}

    # -- one segment ---------------------------------------------------------------------------------------------------

    def _of(self, unit: int) -> list[Segment]:
        return [self.layout.segments[i] for i in self.layout.units[unit].segments]

    def _itemsize(self, segment: Segment) -> int:
        return self._dtype(segment).itemsize

    def _dtype(self, segment: Segment) -> torch.dtype:
        return self.stored_dtype if self.stored_dtype is not None and segment.dtype.is_floating_point else segment.dtype

    def _own(self, segment: Segment, rank: int) -> int:
        start, stop = segment.cut(rank)
        return stop - start

    def _payload(self, segment: Segment, elements: int) -> int:
        return _payload(self.config.all_gather, elements, self._dtype(segment))

    def _levels(self, segment: Segment) -> tuple[_Level, ...]:
        """The groups of the segment's gather; of leaves with sharers, the block."""
        if segment.sharers is None:
            return self.levels
        return () if segment.alone else (_Level(f"{self.group.name}:sharers", len(segment.sharers[0])),)

    def _gather(
        self, sent: Counter[tuple[str, str]], s: Segment, rank: int, times: int, *, inter_node: int, intra_node: int = 2
    ) -> None:
        levels = self._levels(s)
        if s.owner is not None:
            if levels and s.place(rank) == s.owner:
                sent["broadcast", levels[0].name] += intra_node * times * (levels[0].size - 1) * s.size * self._itemsize(s)
            return
        payload = self._payload(s, s.shard)
        for place, level in enumerate(levels):
            passes = inter_node if place == 0 and len(levels) > 1 else intra_node
            group = f"{level.name}/gather" if place else level.name
            sent["all_gather", group] += passes * times * (level.size - 1) * payload
            payload *= level.size

    def _reduce(self, sent: Counter[tuple[str, str]], s: Segment, rank: int, replica: int, times: int, *, grown: bool) -> None:
        config, dtype = self.config, self._dtype(s)
        half = dtype.itemsize == 2 and dtype.is_floating_point
        summed = torch.float32 if half and grown else dtype  # what local sums over micro-batches are kept in
        comm_dtype = (self.comm_dtype or dtype) if (summed if config.stage < 2 else dtype) == dtype else summed
        comm_dtype = comm_dtype if s.dtype.is_floating_point else s.dtype
        copies = self.replicas.size if self.replicas is not None else 1
        levels = self._levels(s)
        if config.stage == 0:
            self._reduce_whole(sent, s, comm_dtype, copies, replica)
            return
        if s.owner is not None:
            if levels and s.place(rank) != s.owner:
                sent["reduce", f"{levels[0].name}/reduce"] += times * s.size * comm_dtype.itemsize
        elif config.aggregate == "all_reduce":
            group = self.group if s.sharers is None else _Level(f"{self.group.name}:sharers", len(s.sharers[0]))
            for key, size in _all_reduce(config.all_reduce, group, s.size, comm_dtype, s.place(rank)).items():
                sent[key] += times * size
        else:
            elements = s.size
            for level in reversed(levels):
                elements //= level.size
                name, size = _scatter(config.reduce_scatter, elements, comm_dtype)
                sent[name, f"{level.name}/reduce"] += times * (level.size - 1) * size
        if self.replicas is not None and copies > 1:
            shared = torch.float32 if half and grown else comm_dtype
            own = self._own(s, rank)
            sent["all_reduce", f"{self.replicas.name}/reduce"] += _volume(own, copies, replica) * shared.itemsize

    def _reduce_whole(
        self, sent: Counter[tuple[str, str]], s: Segment, comm_dtype: torch.dtype, copies: int, replica: int
    ) -> None:
        config, levels = self.config, self._levels(s)
        if self.replicas is None or copies == 1:
            for level in levels:
                sent.update(_all_reduce(config.all_reduce, level, s.size, comm_dtype, 0))
        elif not levels:
            sent.update(_all_reduce(config.all_reduce, self.replicas, s.size, comm_dtype, replica))
        else:
            (level,) = levels
            for name, channel in (("reduce_scatter", "reduce"), ("all_gather", "return")):
                sent[name, f"{level.name}/{channel}"] += (level.size - 1) * s.shard * comm_dtype.itemsize
            sent.update(_all_reduce(config.all_reduce, self.replicas, s.shard, comm_dtype, replica))

    # -- as text -------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        config, layout = self.config, self.layout
        sizes = [sum(s.size for s in self._of(unit)) for unit in range(len(layout.units))]
        regions = [LeafRegion.of(slot.shape, slot.slices) for segment in layout.segments for slot in segment.slots]
        cut = [region for region in regions if region.ranges]
        lines = [
            str(config),
            f"ranks      {layout.n} shards"
            + "".join(f", {level.name!r} of {level.size}" for level in self.levels)
            + (f"; replicated over {self.replicas.name!r} of {self.replicas.size}" if self.replicas is not None else ""),
            f"units      {len(layout.units)}: "
            + _listed([f"{u.name} ({size:,})" for u, size in zip(layout.units, sizes, strict=True)]),
            f"stored     {self.held():,} bytes of params"
            + (f", {_elements(self.whole):,} elements whole" if self.whole else "")
            + (f", {_elements(self.sharded):,} in shards" if self.sharded else ""),
        ]
        if cut:
            here, whole = sum(region.numel for region in cut), sum(math.prod(region.shape) for region in cut)
            lines.append(f"slices     {len(cut)} of {len(regions)} leaves: {here:,} elements of {whole:,}")
        if config.stage == 3:
            lines.append(
                f"fetched    {config.max_live_units} whole and {config.prefetch} ahead, at most {self.fetched():,} bytes"
                + (f"; kept for the backward pass {self.hpz_bytes():,} bytes" if config.hpz else "")
            )
        how = (
            "all_reduce"
            if config.stage == 0
            else {"owner": "one reduce to each unit's owner"}.get(config.aggregate, config.aggregate)
        )
        lines.append(
            f"gradients  {how} of {_name(self.comm_dtype) if self.comm_dtype else 'what is computed'}"
            + (f", divided by {config.gradient_predivide_factor:g} before" if config.gradient_predivide_factor != 1 else "")
            + (", each micro-batch" if config.stage >= 2 else ", once a step")
        )
        if config.aggregate == "owner":
            owners = Counter(self._of(unit)[0].owner for unit in range(len(layout.units)))
            lines.append(f"owners     {', '.join(f'rank {rank}: {owners[rank]} units' for rank in range(layout.n))}")
        found = self.sent()
        most = "up to " if config.stage == 3 and not config.reshard_last_units and layout.n > 1 else ""
        shown = [
            f"{name} over {group!r} {most if name == 'all_gather' else ''}{size:,}" for (name, group), size in found.items()
        ]
        lines.append(f"sends      bytes a micro-batch and rank: {', '.join(shown) or 'none'}")
        return "\n".join(lines)


def report_costs(
    config: ZeroConfig,
    params: Any,
    *,
    n: int | None = None,
    intra_node: int | None = None,
    replicas: int | None = None,
    stored_dtype: torch.dtype | None = None,
    comm_dtype: torch.dtype | None = None,
) -> CostReport:
    """The bytes that a configuration stores and sends for these params, before anything runs: print it.

    Args:
        config: ``zero(...)``, whose method this is.
        params: a tree; shapes and dtypes are enough. Under tensor or expert parallelism, a rank's slices.
        n: how many ranks shard the state; by default the size of the group, or of the current world.
        intra_node: how many of them make a block; by default as given to ``zero``.
        replicas: how many replicas there are; by default as given to ``zero``.
        stored_dtype: the dtype in which floating params are stored, where ``mixed_precision`` changes it.
        comm_dtype: the dtype in which their gradients are sent, likewise.

    Raises:
        ValueError: n does not factor into blocks of ``intra_node`` ranks.

    >>> from functional_ds import transforms as T
    >>> print(T.zero(3, prefetch=2).cost_report({"h.0.w": torch.ones(8, 4), "h.1.w": torch.ones(8, 4)}, n=4))
    zero(3, world, prefetch=2)
    ranks      4 shards, 'world' of 4
    units      2: h.0 (32), h.1 (32)
    stored     64 bytes of params, 64 in shards
    fetched    2 whole and 2 ahead, at most 256 bytes
    gradients  reduce_scatter of what is computed, each micro-batch
    sends      bytes a micro-batch and rank: all_gather over 'world' up to 384, reduce_scatter over 'world/reduce' 192
    """
    group = config.group
    count = n if n is not None else (group or comm.world()).size
    given = config.intra_node.size if isinstance(config.intra_node, comm.Group) else config.intra_node
    block = given if intra_node is None else intra_node
    if count < 1 or (block is not None and (block < 1 or count % block)):
        raise ValueError(f"n={count}: it does not factor into blocks of intra_node={block} ranks")
    name = "world" if group is None else group.name
    levels = [_Level(name, count)]
    if block is not None:
        within = config.intra_node.name if isinstance(config.intra_node, comm.Group) else f"{name}:intra_node"
        levels = [_Level(f"{name}:inter_node", count // block), _Level(within, block)]
    copies = replicas if replicas is not None else getattr(config.replicate, "size", 1)
    over = _Level(getattr(config.replicate, "name", "replicas"), copies) if copies > 1 else None
    several = tuple(level for level in levels if level.size > 1)
    ranks = config.process_groups().shards.ranks if n is None and intra_node is None else None
    return CostReport(config, config.layout(params, count, ranks), _Level(name, count), several, over, stored_dtype, comm_dtype)


def _payload(collective: Callable[..., Any], elements: int, dtype: torch.dtype) -> int:
    """Bytes that stand for a row of so many elements."""
    row = torch.empty(1, elements, dtype=dtype, device="meta")
    return sum(p.nbytes for p in encode_leaf(collective.codec, row)) if isinstance(collective, Compressed) else row.nbytes


def _scatter(collective: Callable[..., Any], elements: int, dtype: torch.dtype) -> tuple[str, int]:
    name = "all_to_all" if isinstance(collective, Compressed) else "reduce_scatter"
    return name, _payload(collective, elements, dtype)


def _volume(elements: int, n: int, rank: int) -> int:
    """Elements that a rank sends in an all-reduce."""
    bounds = chunk_bounds(elements, n)
    own = bounds[rank + 1] - bounds[rank]
    return (elements - own) + (n - 1) * own


def _all_reduce(
    collective: Callable[..., Any], level: _Level, elements: int, dtype: torch.dtype, rank: int
) -> dict[tuple[str, str], int]:
    channel = f"{level.name}/reduce"
    if level.size == 1:
        return {}
    if not isinstance(collective, Compressed):
        return {("all_reduce", channel): _volume(elements, level.size, rank) * dtype.itemsize}
    payload = (level.size - 1) * _payload(collective, -(-elements // level.size), dtype)
    return {("all_to_all", channel): payload, ("all_gather", f"{channel}/compressed"): payload}


def _elements(segments: list[Segment]) -> int:
    return sum(segment.size for segment in segments)


def _listed(words: list[str]) -> str:
    return ", ".join(words if len(words) < 6 else [*words[:2], "...", *words[-2:]])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
