"""Whether a lowered schedule's messages meet: each has its other end, and no ranks wait for each other."""

import attrs
import numpy as np
import numpy.typing as npt

from .action import MESSAGES, Action, Codes, Kind, kinds, microbatches, stages, unpack
from .graph import Graph, entered
from .schedule import Schedule, ScheduleError

__all__ = ["check_messages", "check_parameters"]

_SENDS = np.array([Kind.SEND_F, Kind.SEND_B])
_FORWARD = np.array([Kind.SEND_F, Kind.RECV_F])


@attrs.frozen(eq=False)
class _Batches:
    """Runs of messages, numbered rank by rank.

    Attributes:
        first: the number of each rank's first batch, and of all.
        messages: the number of each batch's first message, and of all.
        of: the batch of each message.
        place: the place of each message in its row.
    """

    first: Codes
    messages: Codes
    of: Codes
    place: Codes


def check_messages(made: Graph, *, training: bool) -> None:
    """Proves that sends and receives pair up, lie between producer and consumer, and do not deadlock.

    A step of messages is posted when its rank has come to it, and complete when the steps of all other ends are posted too:
    the strictest way to run it. If that comes to an end, so does any way that waits less.

    Raises:
        ScheduleError: a message is wrong, missing, there twice, too early or too late, or overtakes another; or ranks wait in a
            cycle.
    """
    schedule = made.schedule
    boundaries, m = schedule.stages - 1, schedule.microbatches
    table = np.full((2, 2, max(boundaries, 0), m), -1, np.int64)  # [send or receive, F or B, boundary, micro-batch]: message
    flat, count, keys_of = table.reshape(-1), 0, []
    first, sizes, places_of = [0], [], []
    for rank, row in enumerate(schedule.codes):
        kind = kinds(row)
        is_message = (kind >= min(MESSAGES)) & (kind <= max(MESSAGES))
        places = np.flatnonzero(is_message)
        keys = _keys(made, rank, row, places)
        entered(flat, keys, np.arange(count, count + len(places)), row, places, rank)
        starts = np.flatnonzero(np.diff(places, prepend=-2) > 1)  # a batch is a run of neighbouring messages
        sizes.append(np.diff(np.append(starts, len(places))))
        first.append(first[-1] + len(starts))
        keys_of.append(keys)
        places_of.append(places)
        count += len(places)
    _check_all_there(schedule, table, training=training)
    keys, size = np.concatenate(keys_of), np.concatenate(sizes)
    half = table.size // 2
    partner = flat[(keys + half) % (2 * half)] if half else keys
    messages = np.append(0, np.cumsum(size))
    batches = _Batches(np.array(first), messages, np.repeat(np.arange(len(size)), size), np.concatenate(places_of))
    _rendezvous(schedule, batches, batches.of[partner])
    _check_order(schedule, batches, np.flatnonzero(keys < half), partner)


def _keys(made: Graph, rank: int, row: Codes, places: Codes) -> Codes:
    """Where in the table a rank's messages are entered; refuses those that have no other end, and those out of order."""
    schedule, m = made.schedule, made.schedule.microbatches
    chosen = row[places]
    kind, stage, microbatch = kinds(chosen), stages(chosen), microbatches(chosen)
    sends, forward = np.isin(kind, _SENDS), np.isin(kind, _FORWARD)
    boundary = stage - (sends != forward)  # b is that between stages b and b + 1
    holder = np.array([rank, *schedule.placement, rank])
    needless = holder[boundary + 1] == holder[boundary + 2]
    needless |= (boundary < 0) | (boundary >= schedule.stages - 1)

    compute = np.flatnonzero(kinds(row) <= Kind.B)
    node = made.table[np.where(forward, 0, 1), stage + 1, microbatch] - made.first[rank]
    there = (node >= 0) & (node < len(compute))
    other = np.full_like(node, -1)
    other[there] = compute[node[there]]
    wrong = needless | ~there | np.where(sends, places < other, places > other)
    if wrong.any():
        index = int(wrong.argmax())
        action = unpack(chosen[index : index + 1])[0]
        if not 0 <= boundary[index] < schedule.stages - 1:
            why = f"has no other end: stages are 0 to {schedule.stages - 1}"
        elif needless[index]:
            why = f"is needless: stages {boundary[index]} and {boundary[index] + 1} are both on rank {rank}"
        elif not there[index]:
            why = "is about a backward, and the schedule has forwards only"
        else:
            beside = unpack(row[other[index] : other[index] + 1])[0]
            late = f"comes before {beside}, at place {other[index]}, which computes what it sends"
            why = late if sends[index] else f"comes after {beside}, at place {other[index]}, which needs it"
        raise ScheduleError(why, action=action, rank=rank, place=int(places[index]))
    keys: Codes = ((np.where(sends, 0, 2) + np.where(forward, 0, 1)) * (schedule.stages - 1) + boundary) * m + microbatch
    return keys


def _check_all_there(schedule: Schedule, table: Codes, *, training: bool) -> None:
    placement = np.array(schedule.placement)
    needed = np.broadcast_to((placement[:-1] != placement[1:])[:, None], table.shape[2:])
    for forward, directions in ((True, table[:, 0]), (False, table[:, 1])):
        for sends, there in zip((True, False), directions, strict=True):
            missing = needed & (there < 0)
            if missing.any() and (forward or training):
                boundary, microbatch = (int(x) for x in np.argwhere(missing)[0])
                kind = Kind.SEND_F + (0 if sends else 1) + (0 if forward else 2)
                stage = boundary + (sends != forward)
                action = Action(Kind(kind), stage, microbatch)
                raise ScheduleError("is missing; its other end waits", action=action, rank=schedule.placement[stage])


def _ranges(starts: Codes, stops: Codes) -> Codes:
    """start, ..., stop - 1 for each pair, one after another."""
    sizes = stops - starts
    ends = sizes.cumsum()
    joined: Codes = np.repeat(stops - ends, sizes) + np.arange(ends[-1] if len(ends) else 0)
    return joined


def _rendezvous(schedule: Schedule, batches: _Batches, partner: Codes) -> None:
    """Lets all ranks go from step to step; ``partner`` is the batch of each message's other end."""
    waits = np.diff(batches.messages)  # of how many messages of a batch the other end is not posted
    head, stop = batches.first[:-1].copy(), batches.first[1:]
    active = np.flatnonzero(head < stop)
    come = active
    while active.size:
        posted = head[come]
        others = partner[_ranges(batches.messages[posted], batches.messages[posted + 1])]
        np.subtract.at(waits, others, 1)
        go = active[waits[head[active]] == 0]
        if not go.size:
            raise _cycle(schedule, batches, partner, head, active)
        head[go] += 1
        come = go[head[go] < stop[go]]
        if len(come) < len(go):
            active = active[head[active] < stop[active]]


def _check_order(schedule: Schedule, batches: _Batches, sends: Codes, partner: Codes) -> None:
    """Refuses a receive that overtakes another between the same two ranks."""
    rank, receives = np.searchsorted(batches.first, batches.of, "right") - 1, partner[sends]
    order = np.lexsort((sends, rank[receives], rank[sends]))
    sends, receives = sends[order], receives[order]
    alike = (np.diff(rank[sends]) == 0) & (np.diff(rank[receives]) == 0)
    early = np.flatnonzero(alike & (np.diff(receives) < 0))
    if early.size:
        first, second = (_message(schedule, batches, receives[early[0] + i]) for i in range(2))
        sender = rank[sends[early[0]]]
        why = f"comes before {first[2]}, at place {first[1]}, which rank {sender} sends first; messages keep their order"
        raise ScheduleError(why, action=second[2], rank=second[0], place=second[1])


def _message(schedule: Schedule, batches: _Batches, index: int) -> tuple[int, int, Action]:
    """A message's rank, place and action."""
    rank = int(np.searchsorted(batches.first, batches.of[index], "right")) - 1
    place = int(batches.place[index])
    return rank, place, unpack(schedule.codes[rank][place : place + 1])[0]


def _cycle(schedule: Schedule, batches: _Batches, partner: Codes, head: Codes, stuck: Codes) -> ScheduleError:
    def held_up(rank: int) -> tuple[int, int]:
        """A message of the step where a rank waits, and the rank that has not come to its other end."""
        batch = head[rank]
        for index in range(int(batches.messages[batch]), int(batches.messages[batch + 1])):
            other = int(np.searchsorted(batches.first, partner[index], "right")) - 1
            if partner[index] > head[other]:
                return index, other
        raise AssertionError("a rank that waits for nobody goes on")

    rank, path = int(stuck[0]), list[int]()
    while rank not in path:
        path.append(rank)
        rank = held_up(rank)[1]
    lines = []
    for waiting in path[path.index(rank) :]:
        index, other = held_up(waiting)
        _, place, action = _message(schedule, batches, index)
        lines.append(f"rank {waiting} at place {place}: {action} waits for its other end on rank {other}")
    _, place, action = _message(schedule, batches, held_up(rank)[0])
    return ScheduleError("waits in a cycle:\n  " + "\n  ".join(lines), action=action, rank=rank, place=place)


def check_parameters(made: Graph) -> None:
    """Proves that gathered stages are whole when used, and that gradients are reduced once, after the last backward.

    Only what is there is checked: a schedule without gathers keeps its parameters whole.

    Raises:
        ScheduleError: a gather, an evict or a reduce is missing, there twice, or at a wrong place.
    """
    schedule = made.schedule
    gathers, reduces = schedule.has(Kind.GATHER, Kind.EVICT), schedule.has(Kind.REDUCE)
    for rank, row in enumerate(schedule.codes if gathers or reduces else ()):
        kind, stage = kinds(row), stages(row)
        for own in schedule.stages_of(rank):
            mine = np.flatnonzero(stage == own)
            if gathers:
                _check_held(row, mine, kind[mine], rank)
            if reduces:
                _check_reduced(row, mine, kind[mine], rank, own)


def _check_held(row: Codes, places: Codes, kind: npt.NDArray[np.int64], rank: int) -> None:
    change = np.where(kind == Kind.GATHER, 1, 0) - np.where(kind == Kind.EVICT, 1, 0)
    held = change.cumsum()
    wrong = (held < 0) | (held > 1) | ((kind <= Kind.B) & (held != 1))
    if wrong.any():
        index = int(wrong.argmax())
        action = unpack(row[places[index : index + 1]])[0]
        why = "finds the parameters whole already" if held[index] > 1 else "comes while the parameters are not gathered"
        raise ScheduleError(why, action=action, rank=rank, place=int(places[index]))
    if held[-1:].any():
        stage = int(stages(row[places[:1]])[0])
        raise ScheduleError("is missing; the parameters stay whole", action=Action(Kind.EVICT, stage), rank=rank)


def _check_reduced(row: Codes, places: Codes, kind: npt.NDArray[np.int64], rank: int, stage: int) -> None:
    backwards, reduces = np.flatnonzero((kind == Kind.W) | (kind == Kind.B)), np.flatnonzero(kind == Kind.REDUCE)
    if len(backwards) and not len(reduces):
        raise ScheduleError("is missing; other stages' gradients are reduced", action=Action(Kind.REDUCE, stage), rank=rank)
    for index in reduces:
        if index != reduces[0] or index < backwards.max(initial=-1):
            why = "is there again" if index != reduces[0] else "comes before the stage's last backward"
            raise ScheduleError(why, action=Action(Kind.REDUCE, stage), rank=rank, place=int(places[index]))
