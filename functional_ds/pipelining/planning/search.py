"""``optimize``: a better order for given costs and memory."""

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import attrs

from functional_ds.pipelining.schedules.generators import check
from functional_ds.pipelining.schedules.published import by_name
from functional_ds.pipelining.schedules.schedule import Schedule, ScheduleError, check_placement

from .costs import Costs
from .list_scheduling import PriorityRule, list_schedule
from .timeline import timeline

__all__ = ["optimize"]

_FURTHEST = 6  # places that a move takes an action


def optimize(
    p: int,
    m: int,
    costs: Costs,
    *,
    memory_limit: float | Sequence[float] = float("inf"),
    placement: Sequence[int] | None = None,
    rounds: int = 200,
    seed: int = 0,
) -> Schedule:
    """The schedule with the least makespan that a search has found under a limit of memory.

    The search tries, in this order: list schedules whose ranks all prefer the same; every published schedule (``by_name``);
    list schedules whose ranks differ; and the best schedule with single actions moved. It keeps what is better, so

    Law: its makespan is at most that of the best published schedule for the same placement within the limit.

    Args:
        p: ranks.
        m: micro-batches.
        costs: of each stage.
        memory_limit: bytes of activations for each rank, or for all.
        placement: the rank that holds each stage; by default stage s is on rank s.
        rounds: how many rules and how many moves are tried.
        seed: equal seeds find equal schedules.

    Raises:
        ValueError: sizes that do not fit, or a limit that one micro-batch at a time already exceeds; the message names both.

    Cost: a timeline for each round: milliseconds for each of the ``2 * rounds`` while p and m are small.

    >>> from functional_ds.pipelining import by_name, Costs, timeline
    >>> costs = Costs(forward=[4, 1, 1, 2], inputs=[2, 1, 1, 1], weights=[1, 2, 1, 4])
    >>> timeline(optimize(4, 6, costs, memory_limit=4, rounds=20), costs).makespan
    48.0
    >>> min(timeline(each, costs).makespan for each in by_name(4, 6).values())
    51.0
    """
    check(p, m)
    placement = tuple(range(p)) if placement is None else tuple(placement)
    check_placement(placement, p)
    limits = [float(memory_limit)] * p if isinstance(memory_limit, (int, float)) else [float(each) for each in memory_limit]
    if len(limits) != p:
        raise ValueError(f"memory_limit={memory_limit!r} has {len(limits)} limits for p={p} ranks; give one for each, or one")
    simplest = _one_at_a_time(p, m, placement)
    for rank, (peak, limit) in enumerate(zip(timeline(simplest, costs).peak, limits, strict=True)):
        if peak > limit:
            raise ValueError(f"memory_limit={limit:g} on rank {rank}: one micro-batch at a time already takes {peak:g}")
    search = _Search(costs, limits, simplest)
    rules = [(rule, search.offer(search.follow(rule, m))) for rule in _rules(p, m, len(placement))]
    for schedule in (simplest, *by_name(p, m, placement).values()):
        search.offer(schedule)
    chooser = random.Random(seed)
    rule, worth = min(rules, key=lambda pair: pair[1])
    for _ in range(rounds if worth < _REFUSED else 0):
        varied = _varied(rule, chooser)
        found = search.offer(search.follow(varied, m))
        if found <= worth:
            rule, worth = varied, found
    for _ in range(rounds):
        with suppress(ScheduleError):  # the move was across a dependency
            search.offer(_moved(search.best, chooser))
    return search.best


_Worth = tuple[float, float]  # a schedule's makespan, and the sum of the times at which its ranks end; less is better
_REFUSED = (float("inf"), float("inf"))


@attrs.define
class _Search:
    """The best schedule so far.

    Attributes:
        costs: of each stage.
        limits: each rank's bytes of activations.
        best: the schedule; at first one that keeps the limits.
        worth: what it is worth.
    """

    costs: Costs
    limits: Sequence[float]
    best: Schedule
    worth: _Worth = (float("inf"), 0.0)

    def offer(self, schedule: Schedule | None) -> _Worth:
        """What a schedule is worth; keeps the schedule if it is better than the best."""
        worth = _REFUSED if schedule is None else self._judge(schedule)
        if schedule is not None and worth < self.worth:
            self.best, self.worth = schedule, worth
        return worth

    def follow(self, rule: PriorityRule, microbatches: int) -> Schedule | None:
        """The list schedule of a rule."""
        return list_schedule(microbatches, self.costs, self.best.placement, self.limits, rule)

    def _judge(self, schedule: Schedule) -> _Worth:
        timed = timeline(schedule, self.costs)
        if any(peak > limit for peak, limit in zip(timed.peak, self.limits, strict=True)):
            return _REFUSED
        return timed.makespan, sum(float(timed.times(rank)[1].max(initial=0.0)) for rank in range(schedule.ranks))


def _one_at_a_time(p: int, m: int, placement: Sequence[int]) -> Schedule:
    """The schedule with the least memory: each micro-batch forwards and backwards before the next."""
    rows: list[list[str]] = [[] for _ in range(p)]
    for j in range(m):
        for stage, rank in enumerate(placement):
            rows[rank].append(f"{stage}F{j}")
        for stage in reversed(range(len(placement))):
            rows[placement[stage]].append(f"{stage}B{j}")
    return Schedule.of(rows, placement, m)


def _rules(p: int, m: int, stages: int) -> Iterator[PriorityRule]:
    most = m * stages
    for split in (False, True):
        for ahead in sorted({min(size, most) for size in (*range(1, 2 * stages + 1), most)}):
            for behind in {0, p, most} if split else {0}:
                yield PriorityRule((ahead,) * p, (behind,) * p, split)
        staggered = tuple(min(most, -(-stages // p) * (p - rank)) for rank in range(p))
        yield PriorityRule(staggered, tuple(range(p)), split)


def _varied(rule: PriorityRule, chooser: random.Random) -> PriorityRule:
    """The rule with one rank a little further ahead or behind."""
    name = chooser.choice(("ahead", "behind")) if rule.split else "ahead"
    values = list(getattr(rule, name))
    rank, least = chooser.randrange(len(values)), 1 if name == "ahead" else 0
    values[rank] = max(least, values[rank] + chooser.choice((-2, -1, 1, 2)))
    changes: dict[str, Any] = {name: tuple(values)}
    return attrs.evolve(rule, **changes)


def _moved(schedule: Schedule, chooser: random.Random) -> Schedule:
    """The schedule with one action of one rank some places earlier or later."""
    rank = chooser.randrange(schedule.ranks)
    row = schedule.codes[rank].tolist()
    if not row:
        return schedule
    action = row.pop(chooser.randrange(len(row)))
    place = schedule.codes[rank].tolist().index(action) + chooser.choice([*range(-_FURTHEST, 0), *range(1, _FURTHEST + 1)])
    row.insert(max(0, min(place, len(row))), action)
    return attrs.evolve(schedule, codes=[row if other == rank else codes for other, codes in enumerate(schedule.codes)])
