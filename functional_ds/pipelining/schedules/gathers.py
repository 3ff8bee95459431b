"""Whether a lowered schedule's gathers, evictions and reductions fit the actions that use the parameters."""

import numpy as np

from .action import Action, Codes, Kind, kinds, stages, unpack
from .schedule import Schedule, ScheduleError

__all__ = ["check_gathers", "check_reduces"]


def check_gathers(schedule: Schedule) -> None:
    """Proves that each stage is gathered whenever it computes, and evicted at the end.

    A schedule without gathers and evictions passes: its parameters are always whole.

    Raises:
        ScheduleError: a gather or an evict is missing, there twice, or at a wrong place.
    """
    if not schedule.has(Kind.GATHER, Kind.EVICT):
        return
    for rank, row in enumerate(schedule.codes):
        for stage in schedule.stages_of(rank):
            _check_gathers(row, np.flatnonzero(stages(row) == stage), rank, stage)


def _check_gathers(row: Codes, places: Codes, rank: int, stage: int) -> None:
    kind = kinds(row[places])
    gathered = np.cumsum((kind == Kind.GATHER).astype(np.int64) - (kind == Kind.EVICT))  # after each action: 0 or 1
    wrong = (gathered < 0) | (gathered > 1) | ((kind <= Kind.B) & (gathered != 1))
    if wrong.any():
        index = int(wrong.argmax())
        action = unpack(row[places[index : index + 1]])[0]
        why = "finds the parameters whole already" if gathered[index] > 1 else "comes while the parameters are not gathered"
        raise ScheduleError(why, action=action, rank=rank, place=int(places[index]))
    if gathered[-1:].any():
        raise ScheduleError("is missing; the parameters stay whole", action=Action(Kind.EVICT, stage), rank=rank)


def check_reduces(schedule: Schedule) -> None:
    """Proves that each stage's gradients are reduced once, after its last backward.

    A schedule without reductions passes.

    Raises:
        ScheduleError: a reduce is missing, there twice, or too early.
    """
    if not schedule.has(Kind.REDUCE):
        return
    for rank, row in enumerate(schedule.codes):
        for stage in schedule.stages_of(rank):
            _check_reduces(row, np.flatnonzero(stages(row) == stage), rank, stage)


def _check_reduces(row: Codes, places: Codes, rank: int, stage: int) -> None:
    kind = kinds(row[places])
    backwards, reduces = np.flatnonzero((kind == Kind.W) | (kind == Kind.B)), np.flatnonzero(kind == Kind.REDUCE)
    if len(backwards) and not len(reduces):
        raise ScheduleError("is missing; other stages' gradients are reduced", action=Action(Kind.REDUCE, stage), rank=rank)
    for index in reduces:
        if index != reduces[0] or index < backwards.max(initial=-1):
            why = "is there again" if index != reduces[0] else "comes before the stage's last backward"
            raise ScheduleError(why, action=Action(Kind.REDUCE, stage), rank=rank, place=int(places[index]))
