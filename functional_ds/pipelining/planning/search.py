"""``optimize``: a better order for given costs and memory."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from functional_ds.pipelining.schedules.generators import check
from functional_ds.pipelining.schedules.schedule import Schedule, ScheduleError, check_placement
from functional_ds.pipelining.schedules.v_shaped import named

from .costs import Costs
from .list_scheduling import PriorityRule, list_schedule
from .timeline import timeline

__all__ = ["optimize"]

_FURTHEST = 6  # places that a move takes an action


@attrs.frozen
class _Candidate:
    """A schedule and what it is worth: its makespan, then how early its ranks end on the whole."""

    schedule: Schedule
    worth: tuple[float, float]


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

    It starts from every named schedule that keeps the limit and from list schedules with one forward ahead, with two, and so
    on; goes on with list schedules whose ranks differ in how far ahead and behind they are; and then moves single actions.
    It keeps what is better, so

    Law: its makespan is at most that of the best named schedule for the same placement within the limit.

    Args:
        p: ranks.
        m: micro-batches.
        costs: of each stage.
        memory_limit: bytes of activations for each rank, or for all.
        placement: the rank that holds each stage; by default stage s is on rank s.
        rounds: how many policies and how many moves are tried.
        seed: equal seeds find equal schedules.

    Raises:
        ValueError: sizes that do not fit, or a limit that not even one micro-batch at a time keeps: what it takes is named.

    Cost: a timeline for each round, so milliseconds for each of the ``2 * rounds`` while p and m are small.

    >>> from functional_ds.pipelining import Costs, named, timeline
    >>> costs = Costs(forward=[4, 1, 1, 2], inputs=[2, 1, 1, 1], weights=[1, 2, 1, 4])
    >>> timeline(optimize(4, 6, costs, memory_limit=4, rounds=20), costs).makespan
    48.0
    >>> min(timeline(each, costs).makespan for each in named(4, 6).values())
    51.0
    """
    check(p, m)
    placement = tuple(range(p)) if placement is None else tuple(placement)
    check_placement(placement, p)
    limits = [float(memory_limit)] * p if isinstance(memory_limit, (int, float)) else [float(each) for each in memory_limit]
    if len(limits) != p:
        raise ValueError(f"memory_limit={memory_limit!r} has {len(limits)} limits for p={p} ranks; give one for each, or one")
    chooser = random.Random(seed)

    def judged(schedule: Schedule | None) -> _Candidate | None:
        if schedule is None:
            return None
        timed = timeline(schedule, costs)
        if any(peak > limit for peak, limit in zip(timed.peak, limits, strict=True)):
            return None
        ends = sum(float(timed.times(rank)[1].max(initial=0.0)) for rank in range(p))
        return _Candidate(schedule, (timed.makespan, ends))

    simplest = _one_at_a_time(p, m, placement)
    for rank, (peak, limit) in enumerate(zip(timeline(simplest, costs).peak, limits, strict=True)):
        if peak > limit:
            raise ValueError(f"memory_limit={limit:g} on rank {rank}: one micro-batch at a time already takes {peak:g}")
    best = _Candidate(simplest, (float("inf"), 0.0))
    policies: list[tuple[PriorityRule, tuple[float, float]]] = []
    for policy in _policies(p, m, len(placement)):
        found = judged(list_schedule(m, costs, placement, limits, policy))
        if found is not None:
            policies.append((policy, found.worth))
            best = _better(best, found)
    for schedule in (simplest, *named(p, m, placement).values()):
        best = _better(best, judged(schedule))
    if policies:
        policy, worth = min(policies, key=lambda pair: pair[1])
        for _ in range(rounds):
            tried = _varied(policy, chooser)
            found = judged(list_schedule(m, costs, placement, limits, tried))
            if found is not None and found.worth <= worth:
                policy, worth = tried, found.worth
                best = _better(best, found)
    for _ in range(rounds):
        try:
            best = _better(best, judged(_moved(best.schedule, chooser)))
        except ScheduleError:
            continue  # across a dependency
    return best.schedule


def _better(best: _Candidate, found: _Candidate | None) -> _Candidate:
    return best if found is None or best.worth <= found.worth else found


def _one_at_a_time(p: int, m: int, placement: Sequence[int]) -> Schedule:
    """Each micro-batch forwards and backwards before the next: the least memory."""
    rows: list[list[str]] = [[] for _ in range(p)]
    for j in range(m):
        for stage, rank in enumerate(placement):
            rows[rank].append(f"{stage}F{j}")
        for stage in reversed(range(len(placement))):
            rows[placement[stage]].append(f"{stage}B{j}")
    return Schedule.of(rows, placement, m)


def _policies(p: int, m: int, stages: int) -> Iterator[PriorityRule]:
    most = m * stages
    for split in (False, True):
        for ahead in sorted({min(size, most) for size in (*range(1, 2 * stages + 1), most)}):
            for behind in {0, p, most} if split else {0}:
                yield PriorityRule((ahead,) * p, (behind,) * p, split)
        staggered = tuple(min(most, -(-stages // p) * (p - rank)) for rank in range(p))
        yield PriorityRule(staggered, tuple(range(p)), split)


def _varied(policy: PriorityRule, chooser: random.Random) -> PriorityRule:
    """One rank a little further ahead or behind."""
    name = chooser.choice(("ahead", "behind")) if policy.split else "ahead"
    values = list(getattr(policy, name))
    rank, least = chooser.randrange(len(values)), 1 if name == "ahead" else 0
    values[rank] = max(least, values[rank] + chooser.choice((-2, -1, 1, 2)))
    changes: dict[str, Any] = {name: tuple(values)}
    return attrs.evolve(policy, **changes)


def _moved(schedule: Schedule, chooser: random.Random) -> Schedule:
    """One action of one rank some places earlier or later."""
    rank = chooser.randrange(schedule.ranks)
    row = schedule.codes[rank].tolist()
    if not row:
        return schedule
    action = row.pop(chooser.randrange(len(row)))
    place = schedule.codes[rank].tolist().index(action) + chooser.choice([*range(-_FURTHEST, 0), *range(1, _FURTHEST + 1)])
    row.insert(max(0, min(place, len(row))), action)
    return attrs.evolve(schedule, codes=[row if other == rank else codes for other, codes in enumerate(schedule.codes)])
