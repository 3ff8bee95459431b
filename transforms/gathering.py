"""Fetching units from shards: each when first touched, the next one ahead, at most two at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.layout import Layout

from .convoy import Plan, Route, plan_fetches

__all__ = ["Gatherer"]

_DONE = -1


@attrs.define(eq=False)
class Gatherer:
    """Whole units of a sharded tree, for one pass after the other over them.

    Law: any rank may touch any units in any order, or none; every rank takes part in the same gathers.

    Attributes:
        shards: this rank's, one a segment.
        capacity: how many units are whole at once, beside the one that is fetched ahead.
        all_gather: how units are gathered.
    """

    layout: Layout
    shards: Sequence[Tensor]
    group: comm.Group
    capacity: int = 2
    all_gather: Callable[..., Any] = comm.all_gather
    whole: dict[int, list[Tensor]] = attrs.field(factory=dict)
    _route: Route = attrs.field(factory=Route)
    _plan: Plan = attrs.field(factory=lambda: Plan((), {}))
    _made: int = 0  # fetches of the plan that were made
    _ahead: "comm.Pending[Any] | None" = None
    _asked: list[int] = attrs.field(factory=list)
    dropped: Callable[[int], None] = lambda unit: None

    def begin(self, route: Route) -> None:
        """Starts a pass; what is whole already stays."""
        self._route, self._made, self._asked = route, 0, []
        self._plan = Plan((), {}) if route.uses is None else plan_fetches(route.uses, self.capacity, tuple(self.whole))

    def fetch(self, unit: int) -> list[Tensor]:
        """The unit's flat tensors, one a segment."""
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
        pending = self._start(fetch.unit) if self._ahead is None else self._ahead
        self._made += 1
        for unit in fetch.evict:
            self.drop(unit)
        following = self._plan.fetches[self._made : self._made + 1]
        self._ahead = self._start(following[0].unit) if following else None
        self.whole[fetch.unit] = pending.wait()

    def _start(self, unit: int) -> "comm.Pending[Any]":
        shards = [self.shards[segment].detach() for segment in self.layout.units[unit].segments]
        pending: comm.Pending[Any] = self.all_gather(shards, self.group, async_op=True)
        return pending

    def _ask(self, unit: int) -> bool:
        """One round of asking: all say what they need (or that they are through), and all fetch it. True when all are."""
        control = self.group.channel("control")
        needs = set(comm.all_gather(torch.tensor([unit]), control).tolist()) - {_DONE}
        for need in sorted(needs):
            gathered = self._start(need).wait()
            self._asked.append(need)
            for old in [old for old in self.whole if old != unit][: max(0, len(self.whole) - self.capacity + 1)]:
                self.drop(old)
            self.whole[need] = gathered
        return not needs
