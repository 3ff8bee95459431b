"""Every generator, and what can go wrong with a schedule."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st

from functional_ds.pipelining import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    breadth_first,
    dualpipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    validate,
    zb_2p,
    zb_h1,
    zbv,
)

SINGLE = (gpipe, one_f_one_b, zb_h1, zb_2p)
LOOPED = (interleaved_one_f_one_b, breadth_first)
VEES = (zbv, dualpipe_v)

# Ranks and micro-batches: all p <= 16, m <= 64 for ``make laws``, else those where formulas turn and some between.
SIZES = [
    (p, m)
    for p in range(1, 17)
    for m in range(1, 65)
    if settings.default.max_examples > 100 or (3 * p + m) % 13 == 0 or m in (1, p - 1, p, 2 * p - 1, 2 * p, max(2 * p, 40))
]


def least(generator: Callable[..., Schedule], p: int) -> int:
    """The fewest micro-batches that a generator takes."""
    return 2 * p if generator is dualpipe_v else 1


def everyone(p: int, m: int, chunks: int = 3) -> Iterator[Schedule]:
    """Every generator's schedule for these sizes."""
    yield from (each(p, m) for each in (*SINGLE, *VEES) if m >= least(each, p))
    yield from (each(p, m, v=v) for each in LOOPED for v in range(1, chunks + 1))


def generated(p: int = 4, m: int = 9) -> st.SearchStrategy[Schedule]:
    """Schedules of all generators."""
    single = st.builds(lambda each, p, m: each(p, m), st.sampled_from(SINGLE), st.integers(1, p), st.integers(1, m))
    vee = st.builds(lambda each, p, m: each(p, m + least(each, p)), st.sampled_from(VEES), st.integers(1, p), st.integers(0, m))
    looped = st.builds(
        lambda each, p, m, v: each(p, m, v=v), st.sampled_from(LOOPED), st.integers(1, p), st.integers(1, m), st.integers(1, 3)
    )
    return single | vee | looped


def rewritten(schedule: Schedule, chooser: random.Random, moves: int = 8) -> Schedule:
    """A lowered schedule with messages, gathers and reductions moved to other places at which ``validate`` accepts them."""
    for _ in range(moves):
        rows = [list(row) for row in schedule]
        there = [(row, place) for row in rows for place, action in enumerate(row) if action.kind > Kind.B]
        if not there:
            break
        row, place = chooser.choice(there)
        row.insert(chooser.randrange(len(row)), row.pop(place))
        with suppress(ScheduleError):
            schedule = validate(Schedule.of(rows, schedule.placement, schedule.microbatches))
    return schedule


class Mutation:
    """A schedule with one thing wrong, and the actions of which an error must name one."""

    def __init__(self, name: str, schedule: Schedule, *culprits: Action) -> None:
        self.name, self.schedule, self.culprits = name, schedule, set(map(str, culprits))

    def __repr__(self) -> str:
        return f"{self.name} of {self.culprits} in\n{self.schedule}"


def ordered(earlier: Action, later: Action) -> bool:
    """Whether data flows from one action to another of the same micro-batch that comes after it."""
    if earlier.microbatch != later.microbatch or earlier.kind is Kind.W:
        return False
    return later.kind is not Kind.W or earlier.kind is Kind.F or earlier.stage >= later.stage


def mutation(schedule: Schedule, chooser: random.Random) -> Mutation | None:
    """One random mutation of a valid schedule of compute actions; None if the draw does not apply to it."""
    rows = [list(row) for row in schedule]
    rank = chooser.choice([rank for rank, row in enumerate(rows) if row])
    row, name = rows[rank], chooser.choice(("drop", "duplicate", "swap", "micro-batch", "rank"))
    place = chooser.randrange(len(row))
    action = row[place]
    culprits = [action]
    if name == "drop":
        del row[place]
    elif name == "duplicate":
        row.insert(chooser.randrange(len(row) + 1), action)
    elif name == "swap":
        later = [other for other in range(place + 1, len(row)) if ordered(action, row[other])]
        if not later:
            return None
        other = chooser.choice(later)
        culprits.append(row[other])
        row[place], row[other] = row[other], action
    elif name == "micro-batch":
        wrong = chooser.choice([j for j in range(schedule.microbatches + 1) if j != action.microbatch])
        row[place] = action._replace(microbatch=wrong)
        culprits = [row[place]]
    else:
        others = [other for other in range(schedule.ranks) if other != rank]
        if not others:
            return None
        target = rows[chooser.choice(others)]
        target.insert(chooser.randrange(len(target) + 1), row.pop(place))
    return Mutation(name, Schedule.of(rows, schedule.placement, schedule.microbatches), *culprits)
