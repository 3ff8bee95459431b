"""Searches for better schedules for given costs and memory: list scheduling with many rules, and local moves."""

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import attrs
import numpy as np

from functional_ds.pipelining.schedules.action import Action, Kind, packed
from functional_ds.pipelining.schedules.generators import check
from functional_ds.pipelining.schedules.published import by_name
from functional_ds.pipelining.schedules.schedule import Schedule, ScheduleError, check_placement

from .costs import Costs
from .timeline import timeline


@attrs.frozen
class PriorityRule:
    """The priorities of list scheduling.

    Attributes:
        ahead: for each rank, how many forwards may be in flight.
        behind: for each rank, how many backwards for weights may wait while there is other work.
        split: whether backwards are split.
    """

    ahead: tuple[int, ...]
    behind: tuple[int, ...]
    split: bool


class _Rank:
    """A rank's row so far, its ready actions, and its memory."""

    def __init__(self, ahead: int, behind: int, limit: float) -> None:
        self.ahead, self.behind, self.limit = ahead, behind, limit
        self.row: list[Action] = []
        self.free_at = 0.0
        self.held = 0.0  # bytes of activations
        self.in_flight = 0
        self.arrivals: list[tuple[float, Kind, int, int]] = []  # heap of (time, kind, stage, micro-batch)
        self.forwards: list[tuple[int, int]] = []  # heap of (-stage, micro-batch)
        self.backwards: list[tuple[int, int]] = []  # heap of (micro-batch, -stage)
        self.weights: deque[tuple[int, int]] = deque()  # (stage, micro-batch)

    def admit(self, now: float) -> None:
        """Queues what has arrived."""
        while self.arrivals and self.arrivals[0][0] <= now:
            _, kind, stage, microbatch = heapq.heappop(self.arrivals)
            if kind is Kind.F:
                heapq.heappush(self.forwards, (-stage, microbatch))
            else:
                heapq.heappush(self.backwards, (microbatch, -stage))

    def choose(self, backward: Kind, needed: Sequence[float]) -> Action | None:
        """Takes the best action from the queues; ``needed`` is the free memory that each stage's forward requires."""
        if len(self.weights) > self.behind:
            return Action(Kind.W, *self.weights.popleft())
        if self.backwards:
            microbatch, stage = heapq.heappop(self.backwards)
            return Action(backward, -stage, microbatch)
        if self.forwards and self.in_flight < self.ahead and self.held + needed[-self.forwards[0][0]] <= self.limit:
            stage, microbatch = heapq.heappop(self.forwards)
            return Action(Kind.F, -stage, microbatch)
        return Action(Kind.W, *self.weights.popleft()) if self.weights else None


class ListScheduler:
    """The ranks, the pending events, and the costs as lists, which are faster to index than arrays.

    Args:
        costs: of each stage.
        placement: the rank that holds each stage.
        limits: each rank's bytes of activations.
        rule: the priorities.

    Attributes:
        needed: for each stage its activations and those of the rank's later stages, so that a micro-batch that has begun can
            always pass all of them.
    """

    def __init__(self, costs: Costs, placement: Sequence[int], limits: Sequence[float], rule: PriorityRule) -> None:
        count = len(placement)
        self.placement = placement
        self.backward = Kind.I if rule.split else Kind.B
        self.ranks = [_Rank(*bounds) for bounds in zip(rule.ahead, rule.behind, limits, strict=True)]
        self.events: list[tuple[float, int]] = []  # heap of (time, rank)
        self.seconds: list[list[float]] = costs.seconds(count).tolist()
        self.crossing: list[float] = costs.crossing(count).tolist()
        shared = costs.shared_on(placement)  # counted with the stage before, whose backward comes later
        self.taken: list[float] = (costs.of("activations", count) - shared).tolist()
        self.freed: list[list[float]] = (costs.freed(count) - np.outer(shared, [0, 0, 1, 1])).tolist()  # of F, I, W, B
        self.needed = [
            sum(self.taken[later] for later in range(stage, count) if placement[later] == rank)
            for stage, rank in enumerate(placement)
        ]

    def run(self, microbatches: int) -> Schedule | None:
        """The schedule that the rule gives; None if it gets stuck, by the limits or the rule."""
        for microbatch in range(microbatches):
            self._release(Kind.F, 0, microbatch, 0.0)
        while self.events:
            now, index = heapq.heappop(self.events)
            rank = self.ranks[index]
            if now < rank.free_at:
                continue  # there is an event for the time when it is free
            rank.admit(now)
            action = rank.choose(self.backward, self.needed)
            if action is not None:
                rank.free_at = self._carry_out(rank, action, now)
                heapq.heappush(self.events, (rank.free_at, index))
        expected = microbatches * len(self.placement) * (3 if self.backward is Kind.I else 2)
        if sum(len(rank.row) for rank in self.ranks) < expected:
            return None
        return Schedule([packed(rank.row) for rank in self.ranks], tuple(self.placement), microbatches)

    def _carry_out(self, rank: _Rank, action: Action, now: float) -> float:
        """Appends an action to a row, and releases what depends on it; returns its end."""
        kind, stage, microbatch = action
        end = now + self.seconds[stage][kind]
        rank.row.append(action)
        rank.held -= self.freed[stage][kind]
        if kind is Kind.F:
            rank.held += self.taken[stage]
            rank.in_flight += 1
            if stage + 1 < len(self.placement):
                self._release(Kind.F, stage + 1, microbatch, end + self._crossing(stage))
            else:
                self._release(Kind.B, stage, microbatch, end)
        elif kind is Kind.W:
            rank.in_flight -= 1
        else:
            if kind is Kind.I:
                rank.weights.append((stage, microbatch))
            else:
                rank.in_flight -= 1
            if stage:
                self._release(Kind.B, stage - 1, microbatch, end + self._crossing(stage - 1))
        return end

    def _release(self, kind: Kind, stage: int, microbatch: int, time: float) -> None:
        """Makes an action ready from a time on."""
        rank = self.placement[stage]
        heapq.heappush(self.ranks[rank].arrivals, (time, kind, stage, microbatch))
        heapq.heappush(self.events, (time, rank))

    def _crossing(self, stage: int) -> float:
        """Seconds between a stage and the next."""
        return self.crossing[stage] if self.placement[stage] != self.placement[stage + 1] else 0.0


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
    """Searches for the schedule with the least makespan under a memory limit.

    The search tries, in this order: list schedules with one rule for all ranks; every published schedule (``by_name``); list
    schedules whose ranks differ; and the best schedule with single actions moved. It keeps improvements, so

    Law: its makespan is at most that of the best published schedule for the same placement within the limit.

    Args:
        p: ranks.
        m: micro-batches.
        costs: of each stage.
        memory_limit: bytes of activations for each rank, or for all.
        placement: the rank that holds each stage; by default stage s is on rank s.
        rounds: how many rules and how many moves are tried.
        seed: equal seeds give equal schedules.

    Raises:
        ValueError: sizes that do not match, or a limit that one micro-batch at a time already exceeds; names both.

    Cost: a timeline for each of ``2 * rounds`` rounds: milliseconds each while p and m are small.

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
    limits = [float(memory_limit)] * p if isinstance(memory_limit, (int, float)) else [float(limit) for limit in memory_limit]
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
        varied_worth = search.offer(search.follow(varied, m))
        if varied_worth <= worth:
            rule, worth = varied, varied_worth
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
        best: the schedule; at first one within the limits.
        worth: its value.
    """

    costs: Costs
    limits: Sequence[float]
    best: Schedule
    worth: _Worth = (float("inf"), 0.0)

    def offer(self, schedule: Schedule | None) -> _Worth:
        """The value of a schedule; keeps it if it is better than the best."""
        worth = _REFUSED if schedule is None else self._judge(schedule)
        if schedule is not None and worth < self.worth:
            self.best, self.worth = schedule, worth
        return worth

    def follow(self, rule: PriorityRule, microbatches: int) -> Schedule | None:
        """The list schedule of a rule."""
        return ListScheduler(self.costs, self.best.placement, self.limits, rule).run(microbatches)

    def _judge(self, schedule: Schedule) -> _Worth:
        timed = timeline(schedule, self.costs)
        if any(peak > limit for peak, limit in zip(timed.peak, self.limits, strict=True)):
            return _REFUSED
        return timed.makespan, sum(float(timed.times(rank)[1].max(initial=0.0)) for rank in range(schedule.ranks))


def _one_at_a_time(p: int, m: int, placement: Sequence[int]) -> Schedule:
    """The schedule with the least memory: the forwards and backwards of each micro-batch before the next."""
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
