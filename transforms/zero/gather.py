"""Fetching units from shards: each when first touched, some ahead, a few at a time."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.sharding.layout import Layout

from .collectives import Carriage
from .prefetch import Plan, Route, plan_fetches

__all__ = ["Gatherer"]

_DONE = -1


@attrs.define(eq=False)
class Gatherer:
    """Whole units of a sharded tree, for one pass after the other over them.

    Law: any rank may touch any units in any order, or none; every rank takes part in the same gathers.

    At most ``live + ahead`` units are there at once, those under way included; what is persistent comes on top, and what
    an operation still has in hand of a unit that made room.

    Attributes:
        stored: this rank's shards, one a segment; persistent segments are whole.
        live: how many units are whole at once, beside those that are fetched ahead.
        ahead: how many units are fetched ahead of the one that is needed.
        seconds: what came across in one pass, by unit, from which the next pass gathers inside; None to gather anew.
    """

    layout: Layout
    stored: Sequence[Tensor]
    carriage: Carriage
    live: int = 2
    ahead: int = 1
    seconds: "dict[int, comm.Pending[Any]] | None" = None
    whole: dict[int, list[Tensor]] = attrs.field(factory=dict)
    _route: Route = attrs.field(factory=Route)
    _plan: Plan = attrs.field(factory=lambda: Plan((), {}))
    _made: int = 0  # fetches of the plan that were made
    _under_way: "deque[comm.Pending[Any]]" = attrs.field(factory=deque)
    _asked: list[int] = attrs.field(factory=list)
    dropped: Callable[[int], None] = lambda unit: None

    def begin(self, route: Route) -> None:
        """Starts a pass; what is whole already stays."""
        self._route, self._made, self._asked = route, 0, []
        self._plan = Plan((), {}) if route.uses is None else plan_fetches(route.uses, self.live, tuple(self.whole))

    def fetch(self, unit: int) -> list[Tensor]:
        """The unit's flat tensors, one a segment."""
        if not self._cut(unit):
            return [self.stored[index].detach() for index in self.layout.units[unit].segments]
        while unit not in self.whole and self._made < len(self._plan.fetches):
            self._advance()
        while unit not in self.whole:
            self._ask(unit)
        return self.whole[unit]

    def finish(self, *, keep: bool) -> None:
        """Ends a pass: takes part in whatever other ranks still need. ``keep`` leaves what the next pass may begin with."""
        while self._made < len(self._plan.fetches):
            self._advance()
        while not self._ask(_DONE):
            pass
        kept = self._plan.end if keep and not self._asked else ()
        for unit in [unit for unit in self.whole if unit not in kept]:
            self.drop(unit)
        self._route.learn(self._asked, len(self.layout.units))

    def spent(self, unit: int) -> None:
        """Drops a unit that nobody holds any more, unless the plan uses it again."""
        if unit in self.whole and self._made >= self._plan.until.get(unit, 0):
            self.drop(unit)

    def drop(self, unit: int) -> None:
        """Forgets a whole unit."""
        self.whole.pop(unit, None)
        self.dropped(unit)

    def _advance(self) -> None:
        fetch = self._plan.fetches[self._made]
        for unit in fetch.evict:
            self.drop(unit)
        pending = self._under_way.popleft() if self._under_way else self._start(fetch.unit)
        self._made += 1
        for following in self._plan.fetches[self._made + len(self._under_way) : self._made + self.ahead]:
            self._under_way.append(self._start(following.unit))
        self.whole[fetch.unit] = pending.wait()
        if self._under_way and self.carriage.ranks.levels > 1:
            self._under_way[0].poll()  # so that its next hop goes on, beside what is computed meanwhile

    def _cut(self, unit: int) -> list[int]:
        """The unit's segments that are in shards."""
        return [index for index in self.layout.units[unit].segments if not self.layout.segments[index].persistent]

    def _start(self, unit: int) -> "comm.Pending[Any]":
        indices = self.layout.units[unit].segments
        cut, seconds = self._cut(unit), self.seconds
        segments, shards = [self.layout.segments[i] for i in cut], [self.stored[i] for i in cut]
        if seconds is not None and unit not in seconds:
            seconds[unit] = self.carriage.gather_across(shards)
        pending = self.carriage.gather(segments, shards, None if seconds is None else seconds[unit])
        if len(cut) == len(indices):
            return pending  # type: ignore[no-any-return]

        def among(found: Sequence[Tensor]) -> list[Tensor]:
            arrived = dict(zip(cut, found, strict=True))
            return [arrived.get(index, self.stored[index].detach()) for index in indices]

        return pending.then(among)  # type: ignore[no-any-return]

    def _ask(self, unit: int) -> bool:
        """One round of asking: all say what they need (or that they are through), and all fetch it. True when all are."""
        control = self.carriage.ranks.shards.channel("control")
        needs = set(comm.all_gather(torch.tensor([unit]), control).tolist()) - {_DONE}
        for need in sorted(needs):
            for old in [old for old in self.whole if old != unit][: max(0, len(self.whole) - self.live + 1)]:
                self.drop(old)
            self.whole[need] = self._start(need).wait()
            self._asked.append(need)
        return not needs
