"""The order in which all ranks fetch units, as data.

Fetching a unit is a collective: every rank must take part, at the same place among its other fetches, even if it does not use
the unit. ``gather.Gatherer`` follows these rules:

- The first pass has no plan. A rank that needs a unit asks: each rank sends one integer, and all ranks fetch every unit that
  any rank asked for. A rank that has finished its pass keeps answering until all have finished.
- The fetches of a pass are the plan of later passes. A rank that needs a unit follows the plan up to its fetch. No rank asks,
  and the next fetches are known in advance.
- A rank may need a unit beyond the plan. It then finishes the plan and asks; the other ranks answer at the end of their pass.
  The plan grows by the units that were asked for.
"""

from collections.abc import Sequence
from functools import cache

import attrs


@attrs.frozen
class Fetch:
    """One fetch of a plan, and the units that are freed before it."""

    unit: int
    evict: tuple[int, ...]


@attrs.frozen
class FetchPlan:
    """The fetches of one pass.

    Attributes:
        fetches: in order.
        last_use: unit -> how many fetches precede its last use.
        end: the units that are whole when the pass ends.
    """

    fetches: tuple[Fetch, ...] = ()
    last_use: dict[int, int] = attrs.field(hash=False, factory=dict)
    end: tuple[int, ...] = ()


@cache
def plan_fetches(uses: tuple[int, ...], capacity: int, start: tuple[int, ...] = ()) -> FetchPlan:
    """The fewest fetches that serve a sequence of uses with at most ``capacity`` whole units at once (Belady 1966).

    The unit whose next use is furthest away is evicted.

    Args:
        uses: the units that a pass uses, in order.
        capacity: how many units may be whole.
        start: the units that are whole before the pass.

    >>> plan = plan_fetches((0, 1, 2, 3, 0), 2)  # unit 0 is kept for its second use
    >>> [(fetch.unit, fetch.evict) for fetch in plan.fetches], plan.end
    ([(0, ()), (1, ()), (2, (1,)), (3, (2,))], (0, 3))
    """
    there = list(start)
    fetches: list[Fetch] = []
    last_use: dict[int, int] = {}
    for i, unit in enumerate(uses):
        if unit not in there:
            evicted: list[int] = []
            while len(there) >= capacity:
                evicted.append(max(there, key=lambda u: _next_use(uses, i, u)))
                there.remove(evicted[-1])
            there.append(unit)
            fetches.append(Fetch(unit, tuple(evicted)))
        last_use[unit] = len(fetches)
    return FetchPlan(tuple(fetches), last_use, tuple(there))


def _next_use(uses: Sequence[int], now: int, unit: int) -> int:
    try:
        return uses.index(unit, now)
    except ValueError:
        return len(uses)


@attrs.define
class FetchTrace:
    """What all ranks fetched in earlier forward, or earlier backward, passes: the uses to plan for.

    Attributes:
        uses: units in order; None before the first pass.
    """

    uses: tuple[int, ...] | None = None

    def extend(self, asked: Sequence[int], n_units: int) -> None:
        """Adds the units that a pass asked for beyond its plan."""
        if self.uses is None:
            self.uses = tuple(asked)
        elif asked:
            longer = (*self.uses, *asked)
            # A program that never asks for the same units twice would grow the plan without bound: start again.
            self.uses = longer if len(longer) <= 8 * n_units else None
