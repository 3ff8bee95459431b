"""An order of fetches that all ranks keep, whatever each of them touches.

Fetching a unit is a collective, so every rank must take part, at the same place among its other fetches, also when it has
no use for that unit. A convoy sees to that:

- The first pass has no plan. Whenever a rank needs a unit it asks all (one integer from each rank), and all fetch what
  anybody asked for. A rank that is through keeps serving until all are through.
- What was fetched becomes the plan of later passes. There, needing a unit means going on in the plan until it is fetched:
  nobody asks, and the next fetch is known early.
- A need beyond the plan is no error: the rank finishes the plan and then asks; the others come to the same question at
  the end of their pass. The plan grows by what was asked for.
"""

from collections.abc import Sequence
from functools import cache

import attrs

__all__ = ["Fetch", "Plan", "Route", "plan_fetches"]


@attrs.frozen
class Fetch:
    """One fetch of a plan, and which units make room for it."""

    unit: int
    evict: tuple[int, ...]


@attrs.frozen
class Plan:
    """The fetches of a pass.

    Attributes:
        fetches: in order.
        until: for each unit, how many fetches have been made when it is used for the last time.
        end: what is still there when the pass is over.
    """

    fetches: tuple[Fetch, ...]
    until: dict[int, int] = attrs.field(hash=False)
    end: tuple[int, ...] = ()


@cache
def plan_fetches(uses: tuple[int, ...], capacity: int, start: tuple[int, ...] = ()) -> Plan:
    """The fetches that serve a sequence of uses with at most ``capacity`` units at once, ``start`` being there already.

    The unit whose next use is furthest away makes room, which makes the number of fetches least (Belady 1966).

    >>> plan = plan_fetches((0, 1, 2, 3, 0), 2)  # unit 0 is kept for its second use
    >>> [(fetch.unit, fetch.evict) for fetch in plan.fetches], plan.end
    ([(0, ()), (1, ()), (2, (1,)), (3, (2,))], (0, 3))
    """
    there = list(start)
    fetches: list[Fetch] = []
    until: dict[int, int] = {}
    for i, unit in enumerate(uses):
        if unit not in there:
            evicted: list[int] = []
            while len(there) >= capacity:
                evicted.append(max(there, key=lambda u: _next_use(uses, i, u)))
                there.remove(evicted[-1])
            there.append(unit)
            fetches.append(Fetch(unit, tuple(evicted)))
        until[unit] = len(fetches)
    return Plan(tuple(fetches), until, tuple(there))


def _next_use(uses: Sequence[int], now: int, unit: int) -> int:
    try:
        return uses.index(unit, now)
    except ValueError:
        return len(uses)


@attrs.define
class Route:
    """What the ranks have agreed on so far about one kind of pass: the uses to plan for, None before the first pass."""

    uses: tuple[int, ...] | None = None

    def learn(self, asked: Sequence[int], units: int) -> None:
        """Takes in what a pass asked for beyond its plan."""
        if self.uses is None:
            self.uses = tuple(asked)
        elif asked:
            longer = (*self.uses, *asked)
            # A program that never asks for the same twice would make plans without end: begin anew.
            self.uses = longer if len(longer) <= 8 * units else None
