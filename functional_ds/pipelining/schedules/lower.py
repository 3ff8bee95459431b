"""``lower``: inserts sends, receives, gathers and reductions into a schedule."""

from bisect import bisect_left
from collections.abc import Sequence

import attrs
import numpy as np

from .action import ALL, COMPUTE, MESSAGES, Action, Codes, Kind, kinds, microbatches, pack, stages
from .graph import Floats, Graph, build_graph, earliest_times, weights_done
from .schedule import Schedule


def receives_early(steps: Sequence[tuple[Action, ...]], lead: int) -> list[tuple[Action, ...]]:
    """A rank's steps with each receive posted up to ``lead`` compute actions earlier.

    Law: all other actions keep their order, and so do the receives. A schedule proved for steps that wait for all their
    messages stays deadlock-free when receives do not wait, except with a transport that runs messages in the order in which
    they are posted (NCCL).

    If a send waits for the posted receive (Gloo), a value is then sent while both ranks compute. Each rank needs memory for
    ``lead`` more values.

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
    moved: list[tuple[Action, ...]] = []
    for i, step in enumerate(steps):
        rest = tuple(action for action in step if not _receives(action))
        moved += [batch for batch in (tuple(posted.get(i, ())), rest) if batch]
    return moved


def _receives(action: Action) -> bool:
    return action.kind in (Kind.RECV_F, Kind.RECV_B)


# The order of the actions between two compute actions. _WRITTEN are those that the schedule had already.
_SEND, _RECV, _WRITTEN, _REDUCE, _EVICT, _GATHER, _COMPUTE = range(7)
_UNITS = np.array([1.0, 1.0, 1.0, 2.0])  # of F, I, W, B


def lower(schedule: Schedule, *, gathers: bool = False, reduces: bool | None = None, resident: int = 2) -> Schedule:
    """Lowers a schedule for execution: inserts sends, receives, gathers and reductions between the compute actions.

    If a schedule has messages already, they stay and no others are inserted; the same holds for gathers and reductions.

    A send is placed right after the action that computes its value. A receive is placed before the first action of its rank
    that, in unit times, starts when the value is there or later. Adjacent messages are one step, so two ranks exchange an
    activation for a gradient in one step. Stages on one rank exchange no messages.

    Law: the result has no deadlock even if every step of messages waits until all its other ends are posted. For a step between
    actions a and b of a rank, all its messages are ready in the unit-time run after a's start and not after b's start; so all
    steps are posted, and complete, in the order of these times. Between two ranks messages are received in the order in which
    they are sent.

    Law: ``lower(s).compute_only() == s`` for compute actions alone, and ``lower(lower(s)) == lower(s)``.

    Args:
        schedule: compute actions, and others that are written by hand.
        gathers: parameters are sharded (ZeRO-3): gather a stage's before its use, evict them when others are needed earlier.
        reduces: reduce each stage's gradients after its last backward; by default as ``gathers``.
        resident: the most stages whose parameters a rank holds whole at a time; two allow prefetching one.

    Raises:
        ScheduleError: an action is invalid, missing, duplicated or too early, or ranks wait for each other in a cycle.
        ValueError: ``resident`` is less than one.
        TypeError: ``schedule`` is not a Schedule.

    >>> from functional_ds.pipelining import one_f_one_b
    >>> print(lower(one_f_one_b(2, 2)))
    2 stages on 2 ranks, 2 micro-batches
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    if resident < 1:
        raise ValueError(f"resident={resident}: a rank holds at least the stage that it computes")
    graph = build_graph(schedule)
    start, end = earliest_times(graph, np.concatenate([_UNITS[kinds(row)] for row in graph.rows]))
    holder = np.array([-1, *schedule.placement, -1])
    messages = not schedule.has(*MESSAGES)
    reduces = (gathers if reduces is None else reduces) and not schedule.has(Kind.REDUCE)
    gathers = gathers and not schedule.has(Kind.GATHER, Kind.EVICT)
    rows = []
    for rank, row in enumerate(schedule.codes):
        parts: list[Insertion] = []
        if messages:
            parts += _messages(graph, rank, start, end, holder)
        if reduces:
            parts += _reductions(graph, rank)
        if gathers:
            parts += _gathers(graph.rows[rank], resident)
        rows.append(_merged(row, parts))
    return attrs.evolve(schedule, codes=rows)


# Actions to insert: the place of the compute action that each comes before (or their number), the sort, and packed actions.
Insertion = tuple[Codes, int | Codes, Codes]


def _merged(row: Codes, parts: list[Insertion]) -> Codes:
    """The row with all insertions, ordered by place and sort."""
    computes = kinds(row) <= max(COMPUTE)
    parts = [*parts, (computes.cumsum() - computes, np.where(computes, _COMPUTE, _WRITTEN), row)]
    keys = np.concatenate([gaps * (_COMPUTE + 1) + sort for gaps, sort, _ in parts])
    merged: Codes = np.concatenate([codes for _, _, codes in parts])[np.argsort(keys, kind="stable")]
    return merged


def _messages(graph: Graph, rank: int, start: Floats, end: Floats, holder: Codes) -> tuple[Insertion, Insertion]:
    row, span = graph.rows[rank], graph.span(rank)
    stage, microbatch, forward = stages(row), microbatches(row), kinds(row) == Kind.F
    weight = kinds(row) == Kind.W
    onward = np.where(forward, 1, -1)

    to = np.where(weight, -1, holder[stage + 1 + onward])
    sent = np.flatnonzero((to >= 0) & (to != rank))
    sends = pack(np.where(forward, Kind.SEND_F, Kind.SEND_B)[sent], stage[sent], microbatch[sent])

    source = np.where(weight, -1, holder[stage + 1 - onward])
    got = np.flatnonzero((source >= 0) & (source != rank))
    producers = graph.before[span][got]
    got = got[np.lexsort((producers, end[producers]))]
    receives = pack(np.where(forward, Kind.RECV_F, Kind.RECV_B)[got], stage[got], microbatch[got])
    gaps = np.searchsorted(start[span], end[graph.before[span][got]])
    return (sent + 1, _SEND, sends), (gaps, _RECV, receives)


def _reductions(graph: Graph, rank: int) -> list[Insertion]:
    parts: list[Insertion] = []
    for stage in graph.schedule.stages_of(rank):
        last = int(weights_done(graph, stage).max())
        if last >= 0:  # inference has nothing to reduce
            parts.append((np.array([last + 1 - graph.first[rank]]), _REDUCE, pack(Kind.REDUCE, stage, ALL)))
    return parts


def _gathers(row: Codes, resident: int) -> list[Insertion]:
    """Gathers and evictions that keep the ``resident`` stages whole that are used next (Belady's rule)."""
    used = stages(row)
    turns = np.flatnonzero(np.diff(used, prepend=-1))  # the actions that use another stage than the one before
    distinct = np.unique(used)
    never = len(turns)
    uses = np.where(used[turns][:, None] == distinct, np.arange(never)[:, None], never)  # [turn, stage]
    following = np.minimum.accumulate(uses[::-1], axis=0)[::-1]  # each stage's next use, from each turn on
    soon = (following.argsort(axis=1, kind="stable").argsort(axis=1) < resident) & (following < never)
    held = np.vstack([np.zeros_like(distinct, bool), soon, np.zeros_like(distinct, bool)])
    gaps = np.append(turns, len(row))
    gathered, evicted = np.argwhere(held[1:] & ~held[:-1]), np.argwhere(~held[1:] & held[:-1])
    gathered = gathered[np.lexsort((following[tuple(gathered.T)], gathered[:, 0]))]
    return [
        (gaps[turn_stage[:, 0]], sort, pack(kind, distinct[turn_stage[:, 1]], ALL))
        for turn_stage, sort, kind in ((gathered, _GATHER, Kind.GATHER), (evicted, _EVICT, Kind.EVICT))
    ]
