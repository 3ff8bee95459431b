"""``validate``: proves a schedule, or names its first offending action."""

from collections.abc import Sequence

import numpy as np

from .action import MESSAGES, Action, Codes, Kind, kinds, stages
from .earliest import earliest_times
from .graph import build_graph
from .messages import check_messages
from .schedule import Schedule, ScheduleError

__all__ = ["in_flight", "validate"]


def validate(schedule: Schedule, *, training: bool = True, in_flight: int | Sequence[int] | None = None) -> Schedule:
    """Proves that a schedule can be run, and returns it.

    Law 32, for all stages s and micro-batches j: each action is there exactly once, on the rank that holds its stage; F(s, j)
    comes after F(s - 1, j); B(s, j) or I(s, j) after that of s + 1 and after F(s, j); W(s, j) after I(s, j); and there is
    either B or I and W. "After" means later in a rank's row, or after what the rank waits for; together they have no cycle.

    Law 33, for a schedule with messages: each message that is needed is there exactly once, a send after the action that
    computes its value, a receive before the action that needs it; no rank waits forever, even if each step of messages waits
    for all its other ends; and between two ranks messages are received in the order in which they are sent, as transports
    carry them. (If a schedule without messages passes, its lowered form passes, too.) Gathers and reductions, where there are
    any, fit their uses.

    Args:
        schedule: of compute actions, or lowered, in whole or in part.
        training: whether backwards are needed; False for inference, which has none.
        in_flight: the most forwards whose backward is not complete: for each rank, or one number for all.

    Raises:
        ScheduleError: names the first offending action, its rank, its place, and the reason; for a deadlock, the cycle.
        ValueError: ``in_flight`` has bounds for another number of ranks.
        TypeError: ``schedule`` is no schedule.

    >>> validate(Schedule.of(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]))
    Traceback (most recent call last):
        ...
    functional_ds.pipelining.schedules.schedule.ScheduleError: rank 0, place 1: 0B0 waits in a cycle:
      rank 0 at place 1: 0B0 waits for 1B0, at place 2 of rank 1
      rank 1 at place 1: 1F1 waits for 0F1, at place 2 of rank 0
    """
    graph = build_graph(schedule, training=training)
    earliest_times(graph, np.ones(graph.size))
    if in_flight is not None:
        _check_in_flight(schedule, in_flight)
    if schedule.has(*MESSAGES):
        check_messages(graph, training=training)
    for check, some in ((_check_gathers, (Kind.GATHER, Kind.EVICT)), (_check_reduces, (Kind.REDUCE,))):
        if schedule.has(*some):  # parameters are always whole where nothing is gathered
            for rank, row in enumerate(schedule.codes):
                for stage in schedule.stages_of(rank):
                    check(row, np.flatnonzero(stages(row) == stage), rank, stage)
    return schedule


def _levels(row: Codes) -> Codes:
    """How many are in flight after each action."""
    kind = kinds(row)
    levels: Codes = np.cumsum((kind == Kind.F).astype(np.int64) - ((kind == Kind.B) | (kind == Kind.W)))
    return levels


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """On each rank, the most pairs of stage and micro-batch that were forwarded and whose backward was not complete.

    With split backwards a pair is in flight until its W, which needs its activations.

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
            why = f"puts {most + 1} in flight; in_flight allows {most}"
            raise ScheduleError.at(row, int(over.argmax()), why, rank=rank)


def _check_gathers(row: Codes, places: Codes, rank: int, stage: int) -> None:
    """A stage is gathered whenever it computes, and evicted at the end."""
    kind = kinds(row[places])
    gathered = np.cumsum((kind == Kind.GATHER).astype(np.int64) - (kind == Kind.EVICT))  # after each action: 0 or 1
    wrong = (gathered < 0) | (gathered > 1) | ((kind <= Kind.B) & (gathered != 1))
    if wrong.any():
        index = int(wrong.argmax())
        why = "finds the parameters whole already" if gathered[index] > 1 else "comes while the parameters are not gathered"
        raise ScheduleError.at(row, places[index], why, rank=rank)
    if gathered[-1:].any():
        raise ScheduleError("is missing; the parameters stay whole", Action(Kind.EVICT, stage), rank)


def _check_reduces(row: Codes, places: Codes, rank: int, stage: int) -> None:
    """A stage's gradients are reduced once, after its last backward."""
    kind = kinds(row[places])
    backwards, reduces = np.flatnonzero((kind == Kind.W) | (kind == Kind.B)), np.flatnonzero(kind == Kind.REDUCE)
    if len(backwards) and not len(reduces):
        raise ScheduleError("is missing; other stages' gradients are reduced", Action(Kind.REDUCE, stage), rank)
    for index in reduces:
        if index != reduces[0] or index < backwards.max(initial=-1):
            why = "is there again" if index != reduces[0] else "comes before the stage's last backward"
            raise ScheduleError.at(row, places[index], why, rank=rank)
