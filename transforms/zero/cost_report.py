"""What a strategy will hold and send, from shapes alone."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import torch

from functional_ds import comm
from functional_ds.comm.compression.compressed import Compressed, encode_leaf
from functional_ds.comm.record.reduction import chunk_bounds
from functional_ds.sharding.layout import Layout, Segment

from .config import Knobs

__all__ = ["Plan", "plan"]


@attrs.frozen
class _Level:
    """A group, as far as bytes go."""

    name: str
    size: int


@attrs.frozen
class Plan:
    """A strategy for given params; as text, a few lines.

    Attributes:
        knobs: what was asked for.
        layout: units, segments and shards.
        group: the ranks that cut the state.
        levels: the groups that a gather goes over, in order; a reduction goes the other way.
        replicas: the group over which shards are replicated.
        stored: the dtype in which floating leaves are stored; None for their own.
        wire: the dtype in which their gradients travel; None for the stored one.
    """

    knobs: Knobs
    layout: Layout
    group: _Level
    levels: tuple[_Level, ...]
    replicas: _Level | None
    stored: torch.dtype | None = None
    wire: torch.dtype | None = None

    @property
    def whole(self) -> list[Segment]:
        """The segments whose params are whole between steps."""
        return [s for s in self.layout.segments if self.knobs.stage < 3 or s.persistent]

    @property
    def cut(self) -> list[Segment]:
        """Those whose params are in shards."""
        return [s for s in self.layout.segments if self.knobs.stage == 3 and not s.persistent]

    def held(self, rank: int = 0) -> int:
        """Bytes of stored params on a rank, the exact shards beside what is compressed included."""
        whole = sum(s.size * self._itemsize(s) for s in self.whole)
        cut = sum(self._own(s, rank) * self._itemsize(s) for s in self.cut)
        beside = self.knobs.inexact and self.knobs.stage and self.layout.n > 1
        exact = sum(self._own(s, rank) * self._itemsize(s) for s in self.whole) if beside else 0
        return whole + cut + exact

    def fetched(self) -> int:
        """Bytes of the units that stage 3 has whole at once, at most, those under way included; its largest ones."""
        sizes = [
            sum(s.size * self._itemsize(s) for s in self._of(unit) if not s.persistent)
            for unit in range(len(self.layout.units))
        ]
        most = sorted(sizes, reverse=True)[: self.knobs.live + self.knobs.prefetch]
        return sum(most) if self.knobs.stage == 3 and self.layout.n > 1 else 0

    def seconds(self) -> int:
        """Bytes that ``secondary`` keeps from the forward pass to the end of the backward."""
        if not self.knobs.secondary or len(self.levels) < 2:
            return 0
        return self.levels[0].size * sum(self._payload(s, s.shard) for s in self.cut)

    def sent(self, *, micro_batches: int = 1, rank: int = 0, replica: int = 0) -> dict[tuple[str, str], int]:
        """Bytes that a rank sends in a step, by collective and group, as a ledger names them.

        Params and gradients; scalars, what an optimizer sends, and the ranks' agreements come on top. In stage 3 every unit
        is used once and needed in the backward pass too; ``keep`` then saves up to ``live`` units of each micro-batch.

        Args:
            micro_batches: how many the step has.
            rank: whose shard.
            replica: which replica.
        """
        sent: Counter[tuple[str, str]] = Counter()
        each = micro_batches if self.knobs.stage >= 2 else 1
        for segment in self.cut:
            self._gather(sent, segment, rank, micro_batches, across=1 if self.knobs.secondary else 2)
        for segment in self.whole if self.knobs.stage else []:
            if segment.trainable:
                self._gather(sent, segment, rank, 1, across=1, inside=1)
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
        return self.stored if self.stored is not None and segment.dtype.is_floating_point else segment.dtype

    def _own(self, segment: Segment, rank: int) -> int:
        start, stop = segment.cut(rank)
        return stop - start

    def _payload(self, segment: Segment, elements: int) -> int:
        return _payload(self.knobs.all_gather, elements, self._dtype(segment))

    def _gather(
        self, sent: Counter[tuple[str, str]], s: Segment, rank: int, times: int, *, across: int, inside: int = 2
    ) -> None:
        if s.owner is not None:
            size = (self.layout.n - 1) * s.size * self._itemsize(s) if rank == s.owner else 0
            sent["broadcast", self.levels[0].name if self.levels else ""] += inside * times * size
            return
        payload = self._payload(s, s.shard)
        for place, level in enumerate(self.levels):
            passes = across if place == 0 and len(self.levels) > 1 else inside
            sent["all_gather", level.name] += passes * times * (level.size - 1) * payload
            payload *= level.size

    def _reduce(self, sent: Counter[tuple[str, str]], s: Segment, rank: int, replica: int, times: int, *, grown: bool) -> None:
        knobs, dtype = self.knobs, self._dtype(s)
        half = dtype.itemsize == 2 and dtype.is_floating_point
        summed = torch.float32 if half and grown else dtype  # what local sums over micro-batches are kept in
        wire = (self.wire or dtype) if (summed if knobs.stage < 2 else dtype) == dtype else summed
        wire = wire if s.dtype.is_floating_point else s.dtype
        copies = self.replicas.size if self.replicas is not None else 1
        if knobs.stage == 0:
            self._reduce_whole(sent, s, wire, copies, replica)
            return
        if s.owner is not None:
            if self.levels:
                sent["reduce", f"{self.levels[0].name}/reduce"] += 0 if rank == s.owner else times * s.size * wire.itemsize
        elif knobs.aggregate == "all_reduce":
            for key, size in _all_reduce(knobs.all_reduce, self.group, s.size, wire, rank).items():
                sent[key] += times * size
        else:
            elements = s.size
            for level in reversed(self.levels):
                elements //= level.size
                name, size = _scatter(knobs.reduce_scatter, elements, wire)
                sent[name, f"{level.name}/reduce"] += times * (level.size - 1) * size
        if self.replicas is not None and copies > 1:
            shared = torch.float32 if half and grown else wire
            own = self._own(s, rank)
            sent["all_reduce", f"{self.replicas.name}/reduce"] += _volume(own, copies, replica) * shared.itemsize

    def _reduce_whole(self, sent: Counter[tuple[str, str]], s: Segment, wire: torch.dtype, copies: int, replica: int) -> None:
        knobs = self.knobs
        if self.replicas is None or copies == 1:
            sent.update(_all_reduce(knobs.all_reduce, self.group, s.size, wire, 0))
        elif not self.levels:
            sent.update(_all_reduce(knobs.all_reduce, self.replicas, s.size, wire, replica))
        else:
            (level,) = self.levels
            for name, channel in (("reduce_scatter", "reduce"), ("all_gather", "return")):
                sent[name, f"{level.name}/{channel}"] += (level.size - 1) * s.shard * wire.itemsize
            sent.update(_all_reduce(knobs.all_reduce, self.replicas, s.shard, wire, replica))

    # -- as text -------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        knobs, layout = self.knobs, self.layout
        sizes = [sum(s.size for s in self._of(unit)) for unit in range(len(layout.units))]
        lines = [
            str(knobs),
            f"ranks      {layout.n} shards"
            + "".join(f", {level.name!r} of {level.size}" for level in self.levels)
            + (f"; replicated over {self.replicas.name!r} of {self.replicas.size}" if self.replicas is not None else ""),
            f"units      {len(layout.units)}: "
            + _listed([f"{u.name} ({size:,})" for u, size in zip(layout.units, sizes, strict=True)]),
            f"stored     {self.held():,} bytes of params"
            + (f", {_elements(self.whole):,} elements whole" if self.whole else "")
            + (f", {_elements(self.cut):,} in shards" if self.cut else ""),
        ]
        if knobs.stage == 3:
            lines.append(
                f"fetched    {knobs.live} whole and {knobs.prefetch} ahead, at most {self.fetched():,} bytes"
                + (f"; kept for the backward pass {self.seconds():,} bytes" if knobs.secondary else "")
            )
        how = (
            "all_reduce"
            if knobs.stage == 0
            else {"owner": "one reduce to each unit's owner"}.get(knobs.aggregate, knobs.aggregate)
        )
        lines.append(
            f"gradients  {how} of {_name(self.wire) if self.wire else 'what is computed'}"
            + (f", divided by {knobs.predivide:g} before" if knobs.predivide != 1 else "")
            + (", each micro-batch" if knobs.stage >= 2 else ", once a step")
        )
        if knobs.aggregate == "owner":
            owners = Counter(self._of(unit)[0].owner for unit in range(len(layout.units)))
            lines.append(f"owners     {', '.join(f'rank {rank}: {owners[rank]} units' for rank in range(layout.n))}")
        found = self.sent()
        most = "up to " if knobs.stage == 3 and knobs.keep and layout.n > 1 else ""
        shown = [
            f"{name} over {group!r} {most if name == 'all_gather' else ''}{size:,}" for (name, group), size in found.items()
        ]
        lines.append(f"sends      bytes a micro-batch and rank: {', '.join(shown) or 'none'}")
        return "\n".join(lines)


def plan(
    knobs: Knobs,
    params: Any,
    *,
    n: int | None = None,
    inside: int | None = None,
    replicas: int | None = None,
    stored: torch.dtype | None = None,
    wire: torch.dtype | None = None,
) -> Plan:
    """What ``knobs`` make of params; sizes that are not given are those of the groups, and of the current world.

    Raises:
        ValueError: n does not factor into blocks of ``inside`` ranks.
    """
    group = knobs.group
    count = n if n is not None else (group or comm.world()).size
    said = knobs.inside.size if isinstance(knobs.inside, comm.Group) else knobs.inside
    block = said if inside is None else inside
    if count < 1 or (block is not None and (block < 1 or count % block)):
        raise ValueError(f"n={count}: it does not factor into blocks of inside={block} ranks")
    name = "world" if group is None else group.name
    levels = [_Level(name, count)]
    if block is not None:
        within = knobs.inside.name if isinstance(knobs.inside, comm.Group) else f"{name}:inside"
        levels = [_Level(f"{name}:across", count // block), _Level(within, block)]
    copies = replicas if replicas is not None else getattr(knobs.replicate, "size", 1)
    over = _Level(getattr(knobs.replicate, "name", "replicas"), copies) if copies > 1 else None
    layout = knobs.layout(params, count)
    return Plan(knobs, layout, _Level(name, count), tuple(level for level in levels if level.size > 1), over, stored, wire)


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
