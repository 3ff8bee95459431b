"""``lower``: a schedule with the sends, receives, gathers and reductions that it takes."""

from bisect import bisect_left
from collections.abc import Sequence

import attrs
import numpy as np

from .action import ALL, COMPUTE, MESSAGES, Action, Codes, Kind, kinds, microbatches, pack, stages
from .graph import Floats, Graph, graph, sweep, weights_done
from .schedule import Schedule

__all__ = ["lower", "receives_early"]

Steps = list[tuple[Action, ...]]


def receives_early(steps: Sequence[tuple[Action, ...]], lead: int) -> Steps:
    """A rank's row with each receive posted up to ``lead`` compute actions earlier.

    Law: all else keeps its order, and so do the receives. A schedule that is proved even if each step of messages waits stays
    so if receives do not wait; where a transport carries messages in the order in which they are posted it may not.

    Where the receiver must have posted before a sender can send (Gloo), a value then travels while both compute. Each rank has
    room for ``lead`` more values.

    >>> from functional_ds.pipelining import lower, one_f_one_b
    >>> row = list(lower(one_f_one_b(2, 2)).steps(1))
    >>> [" ".join(map(str, step)) for step in receives_early(row, 1)]
    ['1RECV_F0', '1RECV_F1', '1F0', '1B0', '1SEND_B0', '1F1', '1B1', '1SEND_B1']
    """
    computes = [i for i, step in enumerate(steps) if step[0].kind in COMPUTE]
    posted: dict[int, list[Action]] = {}
    for i, step in enumerate(steps):
        earlier = bisect_left(computes, i)
        place = computes[max(0, earlier - lead)] if earlier else i
        posted.setdefault(place, []).extend(action for action in step if _receives(action))
    made: Steps = []
    for i, step in enumerate(steps):
        rest = tuple(action for action in step if not _receives(action))
        made += [each for each in (tuple(posted.get(i, ())), rest) if each]
    return made


def _receives(action: Action) -> bool:
    return action.kind in (Kind.RECV_F, Kind.RECV_B)


# What stands between two compute actions comes in this order.
_SEND, _RECV, _WRITTEN, _REDUCE, _EVICT, _GATHER, _COMPUTE = range(7)
_UNITS = np.array([1.0, 1.0, 1.0, 2.0])  # of F, I, W, B


def lower(schedule: Schedule, *, gathers: bool = False, reduces: bool | None = None, resident: int = 2) -> Schedule:
    """The schedule that an executor runs: each rank's compute actions, and between them what is sent and received.

    What a schedule has already stays as it is written: messages are put in where it has none at all, and so are gathers and
    reductions.

    A send stands right after the action that computes its value. A receive stands before the first action of its rank that
    starts, at unit times, when the value is there or later: as early as it can be met, no earlier. Neighbouring messages are
    one step, so ranks that exchange an activation for a gradient do that at once. Stages of one rank send each other nothing.

    Law: the result has no deadlock even if every step of messages waits until all its other ends are there. For a step
    between actions a and b of a rank, all its messages were ready in the unit-time run after a's start and not after b's
    start; so all steps are posted, and complete, in the order of these times. Between two ranks messages are received in the
    order in which they are sent.

    Law: ``lower(s).compute_only() == s`` for compute actions alone, and ``lower(lower(s)) == lower(s)``.

    Args:
        schedule: compute actions, and what else is written by hand.
        gathers: parameters are sharded (ZeRO-3): gather a stage's before its use, evict them when others are needed earlier.
        reduces: reduce each stage's gradients after its last backward; by default as ``gathers``.
        resident: how many stages' parameters a rank may hold whole at a time; two let it fetch one ahead.

    Raises:
        ScheduleError: an action is wrong, missing, there twice or too early, or ranks wait for each other in a cycle.
        ValueError: ``resident`` is less than one.
        TypeError: ``schedule`` is no schedule.

    >>> from functional_ds.pipelining import one_f_one_b
    >>> print(lower(one_f_one_b(2, 2)))
    2 stages on 2 ranks, 2 micro-batches
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    if resident < 1:
        raise ValueError(f"resident={resident}: a rank holds at least the stage that it computes")
    made = graph(schedule)
    start, end = sweep(made, np.concatenate([_UNITS[kinds(row)] for row in made.rows]))
    holder = np.array([-1, *schedule.placement, -1])
    messages = not schedule.has(*MESSAGES)
    reduces = (gathers if reduces is None else reduces) and not schedule.has(Kind.REDUCE)
    gathers = gathers and not schedule.has(Kind.GATHER, Kind.EVICT)
    rows = []
    for rank, row in enumerate(schedule.codes):
        parts: list[Part] = []
        if messages:
            parts += _messages(made, rank, start, end, holder)
        if reduces:
            parts += _reductions(made, rank)
        if gathers:
            parts += _gathers(made.rows[rank], resident)
        rows.append(_merged(row, parts))
    return attrs.evolve(schedule, codes=rows)


# What is put into a row: before which of its compute actions (or after the last), of what sort, and codes in their order.
Part = tuple[Codes, int | Codes, Codes]


def _merged(row: Codes, parts: list[Part]) -> Codes:
    computes = kinds(row) <= max(COMPUTE)
    parts = [*parts, (computes.cumsum() - computes, np.where(computes, _COMPUTE, _WRITTEN), row)]
    keys = np.concatenate([gaps * (_COMPUTE + 1) + sort for gaps, sort, _ in parts])
    merged: Codes = np.concatenate([codes for _, _, codes in parts])[np.argsort(keys, kind="stable")]
    return merged


def _messages(made: Graph, rank: int, start: Floats, end: Floats, holder: Codes) -> tuple[Part, Part]:
    row, span = made.rows[rank], made.span(rank)
    stage, microbatch, forward = stages(row), microbatches(row), kinds(row) == Kind.F
    weight = kinds(row) == Kind.W
    onward = np.where(forward, 1, -1)

    to = np.where(weight, -1, holder[stage + 1 + onward])
    sent = np.flatnonzero((to >= 0) & (to != rank))
    sends = pack(np.where(forward, Kind.SEND_F, Kind.SEND_B)[sent], stage[sent], microbatch[sent])

    source = np.where(weight, -1, holder[stage + 1 - onward])
    got = np.flatnonzero((source >= 0) & (source != rank))
    producers = made.before[span][got]
    got = got[np.lexsort((producers, end[producers]))]
    receives = pack(np.where(forward, Kind.RECV_F, Kind.RECV_B)[got], stage[got], microbatch[got])
    gaps = np.searchsorted(start[span], end[made.before[span][got]])
    return (sent + 1, _SEND, sends), (gaps, _RECV, receives)


def _reductions(made: Graph, rank: int) -> list[Part]:
    parts: list[Part] = []
    for stage in made.schedule.stages_of(rank):
        last = int(weights_done(made, stage).max())
        if last >= 0:  # of forwards alone there is nothing to reduce
            parts.append((np.array([last + 1 - made.first[rank]]), _REDUCE, pack(Kind.REDUCE, stage, ALL)))
    return parts


def _gathers(row: Codes, resident: int) -> list[Part]:
    """Whole at any time: the stages that are used next, as many as may be (Belady's rule)."""
    used = stages(row)
    turns = np.flatnonzero(np.diff(used, prepend=-1))  # where a rank turns to another stage
    own = np.unique(used)
    never = len(turns)
    uses = np.where(used[turns][:, None] == own, np.arange(never)[:, None], never)  # [turn, stage]
    following = np.minimum.accumulate(uses[::-1], axis=0)[::-1]  # each stage's next use, from each turn on
    soon = (following.argsort(axis=1, kind="stable").argsort(axis=1) < resident) & (following < never)
    held = np.vstack([np.zeros_like(own, bool), soon, np.zeros_like(own, bool)])
    gaps = np.append(turns, len(row))
    gathered, evicted = np.argwhere(held[1:] & ~held[:-1]), np.argwhere(~held[1:] & held[:-1])
    gathered = gathered[np.lexsort((following[tuple(gathered.T)], gathered[:, 0]))]
    return [
        (gaps[turn_stage[:, 0]], sort, pack(kind, own[turn_stage[:, 1]], ALL))
        for turn_stage, sort, kind in ((gathered, _GATHER, Kind.GATHER), (evicted, _EVICT, Kind.EVICT))
    ]
