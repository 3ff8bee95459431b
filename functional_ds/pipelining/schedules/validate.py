"""``validate``: a schedule is right, or the first action that is not."""

from collections.abc import Sequence

import numpy as np

from .action import MESSAGES, Codes, Kind, kinds, unpack
from .graph import graph, sweep
from .messages import check_messages, check_parameters
from .schedule import Schedule, ScheduleError

__all__ = ["in_flight", "validate"]


def validate(schedule: Schedule, *, training: bool = True, in_flight: int | Sequence[int] | None = None) -> Schedule:
    """Proves that a schedule can be run, and gives it back.

    Law 32, for all stages s and micro-batches j: each action is there exactly once, on the rank that holds its stage; F(s, j)
    comes after F(s - 1, j); B(s, j) or I(s, j) after that of s + 1 and after F(s, j); W(s, j) after I(s, j); and there is
    either B or I and W. "After" is the order of one rank's row and of what ranks wait for: together they have no cycle.

    Law 33, for a schedule with messages: each one that is needed is there exactly once, after what computes it or before what
    needs it; nobody waits forever, even if each step of messages waits for all its other ends; and between two ranks messages
    are received in the order in which they are sent, as transports carry them. (A schedule without messages that passes is one
    whose lowered form does.) Gathers and reductions, where there are any, fit their uses.

    Args:
        schedule: of compute actions, or lowered, in whole or in part.
        training: whether backwards are needed; False for inference, which has none.
        in_flight: the most forwards whose backward is not complete, on each rank or on all.

    Raises:
        ScheduleError: names the first offending action, its rank, its place, and why; a deadlock's message is the cycle.
        ValueError: bounds for another number of ranks.
        TypeError: ``schedule`` is no schedule.

    >>> validate(Schedule.of(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]))
    Traceback (most recent call last):
        ...
    functional_ds.pipelining.schedules.schedule.ScheduleError: rank 0, place 1: 0B0 waits in a cycle:
      rank 0 at place 1: 0B0 waits for 1B0, at place 2 of rank 1
      rank 1 at place 1: 1F1 waits for 0F1, at place 2 of rank 0
    """
    made = graph(schedule, training=training)
    sweep(made, np.ones(made.size))
    if in_flight is not None:
        _check_in_flight(schedule, in_flight)
    if schedule.has(*MESSAGES):
        check_messages(made, training=training)
    check_parameters(made)
    return schedule


def _levels(row: Codes) -> Codes:
    kind = kinds(row)
    levels: Codes = np.cumsum((kind == Kind.F).astype(np.int64) - ((kind == Kind.B) | (kind == Kind.W)))
    return levels


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """On each rank, the most forwards whose backward was not complete: pairs of stage and micro-batch.

    With split backwards, one is in flight until its W: only then is nothing of it needed any more.

    >>> from functional_ds.pipelining import gpipe, one_f_one_b
    >>> in_flight(gpipe(3, 8)), in_flight(one_f_one_b(3, 8))
    ((8, 8, 8), (3, 2, 1))
    """
    return tuple(int(_levels(row).max(initial=0)) for row in schedule.codes)


def _check_in_flight(schedule: Schedule, bound: int | Sequence[int]) -> None:
    bounds = [bound] * schedule.ranks if isinstance(bound, int) else list(bound)
    if len(bounds) != schedule.ranks:
        raise ValueError(f"in_flight={bound!r} has {len(bounds)} bounds for {schedule.ranks} ranks; give one for each, or one")
    for rank, (row, most) in enumerate(zip(schedule.codes, bounds, strict=True)):
        over = _levels(row) > most
        if over.any():
            place = int(over.argmax())
            action = unpack(row[place : place + 1])[0]
            why = f"puts {most + 1} in flight; in_flight allows {most}"
            raise ScheduleError(why, action=action, rank=rank, place=place)
