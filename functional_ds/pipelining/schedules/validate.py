"""``validate``: proves that a schedule can run, or names its first offending action."""

from collections.abc import Sequence

import attrs
import numpy as np

from .action import MESSAGES, Action, Codes, Kind, kinds, microbatches, stages, unpack
from .graph import Graph, Wait, build_graph, cycle_error, earliest_times, enter
from .schedule import Schedule, ScheduleError


def validate(schedule: Schedule, *, training: bool = True, in_flight: int | Sequence[int] | None = None) -> Schedule:
    """Proves that a schedule can run, and returns it.

    For all stages s and micro-batches j: each action occurs exactly once, on the rank that holds its stage; F(s, j)
    comes after F(s - 1, j); B(s, j) or I(s, j) after that of s + 1 and after F(s, j); W(s, j) after I(s, j); and there is
    either B or I and W. "After" means later in a rank's row, or after what the rank waits for; together they have no cycle.

    For a schedule with messages: each required message occurs exactly once, a send after the action that computes its
    value, a receive before the action that needs it; no rank waits forever, even if each step of messages waits for all its
    other ends; and between two ranks messages are received in the order in which they are sent, as transports deliver them. (If
    a schedule without messages passes, so does its lowered form.) Gathers and reductions, if there are any, match their uses.

    Args:
        schedule: of compute actions, or lowered, in whole or in part.
        training: whether backwards are needed; False for inference, which has none.
        in_flight: the most forwards whose backward is not complete: for each rank, or one number for all.

    Raises:
        ScheduleError: names the first offending action, its rank, its place, and the reason; for a deadlock, the cycle.
        ValueError: ``in_flight`` has bounds for another number of ranks.
        TypeError: ``schedule`` is not a Schedule.

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


_SENDS = np.array([Kind.SEND_F, Kind.SEND_B])
_FORWARD = np.array([Kind.SEND_F, Kind.RECV_F])


@attrs.frozen(eq=False)
class _Messages:
    """A schedule's messages as arrays, numbered rank by rank in row order. Adjacent ones in a row are one batch.

    Attributes:
        schedule: the schedule.
        table: [send or receive, F or B, boundary, micro-batch] the message; -1 if there is none. Boundary b is the one between
            stages b and b + 1.
        keys: where in the flat table each message is.
        place: of each message in its row.
        batch: of each message.
        first_message: of each batch, and the number of all messages.
        first_batch: of each rank, and the number of all batches.
    """

    schedule: Schedule
    table: Codes
    keys: Codes
    place: Codes
    batch: Codes
    first_message: Codes
    first_batch: Codes

    @property
    def partners(self) -> Codes:
        """The message at the other end of each message."""
        half = self.table.size // 2
        return self.table.reshape(-1)[(self.keys + half) % (2 * half)] if half else self.keys

    def ranks(self, messages: Codes) -> Codes:
        """The ranks of these messages."""
        return np.searchsorted(self.first_batch, self.batch[messages], "right") - 1

    def describe(self, message: int) -> tuple[int, int, Action]:
        """A message's rank, place and action."""
        rank, place = int(self.ranks(np.array([message]))[0]), int(self.place[message])
        return rank, place, unpack(self.schedule.codes[rank][place : place + 1])[0]


def check_messages(graph: Graph, *, training: bool) -> None:
    """Proves that sends and receives pair up, are between producer and consumer, and do not deadlock.

    A batch of messages is complete when the batches of all other ends are posted too: the strictest way to run it. If all ranks
    finish this way, they do in any way that waits less.

    Args:
        graph: the schedule's compute actions.
        training: whether gradients must be sent back.

    Raises:
        ScheduleError: a message is invalid, missing, duplicated, too early or too late, or overtakes another; or ranks wait in
            a cycle.
    """
    messages = _collect(graph)
    _check_complete(messages, training=training)
    _check_rendezvous(messages)
    _check_order(messages)


def _collect(graph: Graph) -> _Messages:
    """The messages of a schedule; raises an error for unpaired, duplicate and misplaced ones."""
    schedule = graph.schedule
    table = np.full((2, 2, max(schedule.stages - 1, 0), schedule.microbatches), -1, np.int64)
    keys, places, sizes, count, first_batch = [], [], [], 0, [0]
    for rank, row in enumerate(schedule.codes):
        kind = kinds(row)
        place = np.flatnonzero((kind >= min(MESSAGES)) & (kind <= max(MESSAGES)))
        key = _keys(graph, rank, row, place)
        enter(table.reshape(-1), key, np.arange(count, count + len(place)), row, place, rank)
        starts = np.flatnonzero(np.diff(place, prepend=-2) > 1)
        keys.append(key)
        places.append(place)
        sizes.append(np.diff(np.append(starts, len(place))))
        count += len(place)
        first_batch.append(first_batch[-1] + len(starts))
    size = np.concatenate(sizes)
    return _Messages(
        schedule=schedule,
        table=table,
        keys=np.concatenate(keys),
        place=np.concatenate(places),
        batch=np.repeat(np.arange(len(size)), size),
        first_message=np.append(0, np.cumsum(size)),
        first_batch=np.array(first_batch),
    )


def _keys(graph: Graph, rank: int, row: Codes, places: Codes) -> Codes:
    """Where in the flat table a rank's messages belong; raises an error for unpaired and misplaced ones."""
    schedule = graph.schedule
    chosen = row[places]
    kind, stage, microbatch = kinds(chosen), stages(chosen), microbatches(chosen)
    sends, forward = np.isin(kind, _SENDS), np.isin(kind, _FORWARD)
    boundary = stage - (sends != forward)
    outside = (boundary < 0) | (boundary >= schedule.stages - 1)
    holder = np.array([rank, *schedule.placement, rank])
    needless = outside | (holder[boundary + 1] == holder[boundary + 2])

    compute = np.flatnonzero(kinds(row) <= Kind.B)
    node = graph.table[np.where(forward, 0, 1), stage + 1, microbatch] - graph.first[rank]
    there = (node >= 0) & (node < len(compute))
    user = np.full_like(node, -1)  # the place of the action that computes the value, or needs it
    user[there] = compute[node[there]]
    wrong = needless | ~there | np.where(sends, places < user, places > user)
    if wrong.any():
        index = int(wrong.argmax())
        if outside[index]:
            why = f"has no other end: stages are 0 to {schedule.stages - 1}"
        elif needless[index]:
            why = f"is needless: stages {boundary[index]} and {boundary[index] + 1} are both on rank {rank}"
        elif not there[index]:
            why = "is about a backward, and the schedule has forwards only"
        else:
            beside = f"{unpack(row[user[index] : user[index] + 1])[0]}, at place {user[index]}"
            before, after = f"comes before {beside}, which computes what it sends", f"comes after {beside}, which needs it"
            why = before if sends[index] else after
        raise ScheduleError.at(row, places[index], why, rank=rank)
    slot = np.where(sends, 0, 2) + np.where(forward, 0, 1)
    keys: Codes = (slot * (schedule.stages - 1) + boundary) * schedule.microbatches + microbatch
    return keys


def _check_complete(messages: _Messages, *, training: bool) -> None:
    """Raises an error for a boundary between two ranks that lacks a message of a micro-batch."""
    placement = np.array(messages.schedule.placement)
    needed = (placement[:-1] != placement[1:])[:, None]
    for kind, end, direction in ((Kind.SEND_F, 0, 0), (Kind.RECV_F, 1, 0), (Kind.SEND_B, 0, 1), (Kind.RECV_B, 1, 1)):
        missing = needed & (messages.table[end, direction] < 0)
        if missing.any() and (training or direction == 0):
            boundary, microbatch = (int(x) for x in np.argwhere(missing)[0])
            stage = boundary + (kind in (Kind.RECV_F, Kind.SEND_B))
            action = Action(kind, stage, microbatch)
            raise ScheduleError("is missing; its other end waits", action=action, rank=messages.schedule.placement[stage])


def _check_rendezvous(messages: _Messages) -> None:
    """Advances all ranks from batch to batch; raises an error for a schedule that deadlocks."""
    first, partner = messages.first_message, messages.batch[messages.partners]
    missing = np.diff(first)  # for each batch, how many of its messages have no posted other end
    head, stop = messages.first_batch[:-1].copy(), messages.first_batch[1:]  # each rank's batch, and its last one's end
    active = np.flatnonzero(head < stop)
    arrived = active  # ranks that have reached a new batch
    while active.size:
        posted = head[arrived]
        np.subtract.at(missing, partner[_ranges(first[posted], first[posted + 1])], 1)
        go = active[missing[head[active]] == 0]
        if not go.size:
            raise cycle_error(int(active[0]), lambda rank: _wait(messages, partner, head, rank))
        head[go] += 1
        arrived = go[head[go] < stop[go]]
        if len(arrived) < len(go):
            active = active[head[active] < stop[active]]


def _wait(messages: _Messages, partner: Codes, head: Codes, rank: int) -> Wait:
    """The first message of a rank's batch whose other end is not posted."""
    batch = head[rank]
    for message in range(int(messages.first_message[batch]), int(messages.first_message[batch + 1])):
        other = int(np.searchsorted(messages.first_batch, partner[message], "right")) - 1
        if partner[message] > head[other]:
            _, place, action = messages.describe(message)
            return Wait(place, action, f"waits for its other end on rank {other}", other)
    raise AssertionError("a rank whose other ends are all posted goes on")


def _ranges(starts: Codes, stops: Codes) -> Codes:
    """start, ..., stop - 1 for each pair, one after another."""
    sizes = stops - starts
    ends = sizes.cumsum()
    joined: Codes = np.repeat(stops - ends, sizes) + np.arange(ends[-1] if len(ends) else 0)
    return joined


def _check_order(messages: _Messages) -> None:
    """Raises an error for a receive that overtakes another between the same two ranks."""
    sends = np.flatnonzero(messages.keys < messages.table.size // 2)
    receives = messages.partners[sends]
    sender, receiver = messages.ranks(sends), messages.ranks(receives)
    order = np.lexsort((sends, receiver, sender))
    sender, receiver, receives = sender[order], receiver[order], receives[order]
    same_pair = (np.diff(sender) == 0) & (np.diff(receiver) == 0)
    early = np.flatnonzero(same_pair & (np.diff(receives) < 0))
    if early.size:
        _, later, sent_first = messages.describe(int(receives[early[0]]))
        rank, place, action = messages.describe(int(receives[early[0] + 1]))
        by = f"rank {sender[early[0]]}"
        why = f"comes before {sent_first}, at place {later}, which {by} sends first; messages keep their order"
        raise ScheduleError(why, action=action, rank=rank, place=place)
