"""Gathers sharded units at first use, prefetches some, and bounds how many are whole at a time."""

from collections import deque
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.comm.algorithms.bruck import bruck
from functional_ds.comm.worlds.current import recorder
from functional_ds.sharding.layout import Layout

from .collectives import Collectives
from .units.prefetch import FetchPlan, FetchTrace, plan_fetches

_FINISHED, _FINISHED_WITH_NOTE = -1, -2


@attrs.define(eq=False)
class Gatherer:
    """The source of units that are stored in shards.

    Law: ranks may use any units in any order, or none; every rank takes part in the same gathers.

    At most ``max_live_units + prefetch`` units are whole or in flight at once, in addition to persistent segments and to what
    an operation still holds of an evicted unit.

    Attributes:
        layout: the units.
        shards: this rank's shard of each segment, ``[segment.shard]``; persistent segments are whole.
        collectives: gathers a unit.
        on_drop: is called with each unit that is freed.
        max_live_units: how many units are whole at once, without the prefetched ones.
        prefetch: how many units are fetched ahead of the one that is needed.
        hpz: whether to keep the first level of each gather, over ``inter_node``, and to send it once.
        on_fetch: is called with a pass's plan and the number of its fetches so far, at the beginning and after each.
        whole: the flat tensors of whole units, ``[segment.size]``, by unit.
    """

    layout: Layout
    shards: Sequence[Tensor]
    collectives: Collectives
    on_drop: Callable[[int], None] = lambda unit: None
    max_live_units: int = 2
    prefetch: int = 1
    hpz: bool = False
    on_fetch: Callable[[FetchPlan, int], None] = lambda plan, made: None
    whole: dict[int, list[Tensor]] = attrs.field(factory=dict)
    _trace: FetchTrace = attrs.field(factory=FetchTrace)
    _plan: FetchPlan = attrs.field(factory=FetchPlan)
    _made: int = 0  # fetches of the plan so far
    _in_flight: "deque[comm.Pending[list[Tensor]]]" = attrs.field(factory=deque)
    _asked: list[int] = attrs.field(factory=list)
    _to_gather: dict[int, list[int]] = attrs.field(factory=dict)  # by unit: which segments
    _first_levels: "dict[int, comm.Pending[object]]" = attrs.field(factory=dict)  # hpZ's secondary shards, by unit

    frees = True

    def begin(self, trace: FetchTrace) -> None:
        """Starts a pass; units that are whole stay so."""
        self._trace, self._made, self._asked = trace, 0, []
        self._plan = FetchPlan() if trace.uses is None else plan_fetches(trace.uses, self.max_live_units, tuple(self.whole))
        self.on_fetch(self._plan, 0)

    def resume(self, on_drop: Callable[[int], None], on_fetch: Callable[[FetchPlan, int], None]) -> None:
        """Continues a pass whose loss failed and runs again; the other ranks are not involved."""
        self.on_drop, self.on_fetch = on_drop, on_fetch

    def fetch(self, unit: int) -> list[Tensor]:
        """The unit's flat tensors, one per segment."""
        if unit not in self.whole and not self._sharded(unit):
            return [self.shards[index].detach() for index in self.layout.units[unit].segments]
        while unit not in self.whole and self._made < len(self._plan.fetches):
            self._follow_plan()
        while unit not in self.whole:
            self._ask(unit)
        return self.whole[unit]

    def finish(self, *, reshard: bool, note: bool = False) -> bool:
        """Ends a pass: takes part in the gathers that other ranks still need, then frees units.

        Args:
            reshard: whether to free all units, or to keep those that the next pass may begin with.
            note: a flag to share with all ranks.

        Returns:
            Whether any rank set the flag.
        """
        while self._made < len(self._plan.fetches):
            self._follow_plan()
        while (last := self._ask(_FINISHED_WITH_NOTE if note else _FINISHED)) is None:
            pass
        kept = () if reshard or self._asked else self._plan.end
        for unit in [unit for unit in self.whole if unit not in kept]:
            self._drop(unit)
        self._trace.extend(self._asked, len(self.layout.units))
        return _FINISHED_WITH_NOTE in last

    def release(self, unit: int) -> None:
        """Frees a unit that is no longer referred to, unless the plan uses it again."""
        if unit in self.whole and self._made >= self._plan.last_use.get(unit, 0):
            self._drop(unit)

    def _drop(self, unit: int) -> None:
        self.whole.pop(unit, None)
        self.on_drop(unit)

    def _follow_plan(self) -> None:
        """Makes the plan's next fetch, and starts those ahead of it."""
        fetch = self._plan.fetches[self._made]
        for unit in fetch.evict:
            self._drop(unit)
        for ahead in self._plan.fetches[self._made + len(self._in_flight) : self._made + 1 + self.prefetch]:
            self._in_flight.append(self._start(ahead.unit))
        self._made += 1
        self.whole[fetch.unit] = self._in_flight.popleft().wait()
        self.on_fetch(self._plan, self._made)

    def _sharded(self, unit: int) -> list[int]:
        """The segments to gather: those that are shared and not persistent, or in a file."""
        if unit not in self._to_gather:
            indices, segments = self.layout.units[unit].segments, self.layout.segments
            alone = {i for i in indices if segments[i].alone and isinstance(self.shards[i], Tensor)}
            self._to_gather[unit] = [i for i in indices if not segments[i].persistent and i not in alone]
        return self._to_gather[unit]

    def _start(self, unit: int) -> "comm.Pending[list[Tensor]]":
        indices, sharded = self.layout.units[unit].segments, self._sharded(unit)
        segments, shards = [*map(self.layout.segments.__getitem__, sharded)], [*map(self.shards.__getitem__, sharded)]
        if self.hpz and segments[0].sharers is None and unit not in self._first_levels:
            self._first_levels[unit] = self.collectives.gather_first_level(shards)
        pending = self.collectives.gather(segments, shards, self._first_levels.get(unit))
        if len(sharded) == len(indices):
            return pending

        def with_persistent(flats: Sequence[Tensor]) -> list[Tensor]:
            gathered = dict(zip(sharded, flats, strict=True))
            return [gathered[i] if i in gathered else self.shards[i].detach() for i in indices]

        return pending.then(with_persistent)

    def _ask(self, unit: int) -> set[int] | None:
        """One round: each rank sends the unit that it needs, or that it has finished, and all fetch these units.

        A barrier of the hosts, in ⌈log2 n⌉ messages each.

        Returns:
            What the ranks sent, if all have finished.
        """
        control = self.collectives.groups.shards.channel("control")
        mine = torch.tensor([unit], device=control.world.device)
        sent = set(bruck(mine, control).tolist())
        needs = sent - {_FINISHED, _FINISHED_WITH_NOTE}
        for need in sorted(needs):
            for old in [old for old in self.whole if old != unit][: max(0, len(self.whole) - self.max_live_units + 1)]:
                self._drop(old)
            self.whole[need] = self._start(need).wait()
            self._asked.append(need)
        return None if needs else sent


@attrs.define(eq=False)
class GatherOnce(Gatherer):
    """The source of units of a step that is traced into a graph: each unit is gathered at its first use.

    Graph passes decide what is freed and gathered again.
    """

    frees = False

    def begin(self, trace: FetchTrace) -> None:
        """Does nothing."""

    def fetch(self, unit: int) -> list[Tensor]:
        """The unit's flat tensors, one per segment."""
        if unit not in self.whole:
            with recorder().labelled(self.layout.units[unit].name):
                flats = Gatherer.fetch(self, unit) if not self._sharded(unit) else self._start(unit).wait()
            self.whole[unit] = flats
        return self.whole[unit]

    def finish(self, *, reshard: bool, note: bool = False) -> bool:
        """Does nothing."""
        return note

    def release(self, unit: int) -> None:
        """Does nothing."""
