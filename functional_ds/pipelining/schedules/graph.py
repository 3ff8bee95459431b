"""Dependencies and start times of a schedule's compute actions, as arrays, for validate, lower and timeline."""

from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from .action import COMPUTE, Action, Codes, Kind, kinds, microbatches, stages, unpack
from .schedule import Schedule, ScheduleError

_FORWARD, _INPUT, _WEIGHT = range(3)  # the table's slots; a full backward is in the slot of the backward for inputs
_SLOT = np.array([_FORWARD, _INPUT, _WEIGHT, _INPUT])


@attrs.frozen(eq=False)
class Graph:
    """A schedule's compute actions as nodes.

    Attributes:
        schedule: the schedule.
        rows: each rank's compute actions, packed.
        first: each rank's first node, and the number of all nodes.
        table: [slot, stage + 1, micro-batch] the node of the forward, the backward for inputs, and the one for weights.
        before: the node that each node waits for; the number of all nodes where there is none.
    """

    schedule: Schedule
    rows: tuple[Codes, ...]
    first: Codes
    table: Codes
    before: Codes

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.before)

    def forwards(self, stage: int) -> Codes:
        """The nodes of a stage's forwards, by micro-batch."""
        nodes: Codes = self.table[_FORWARD, stage + 1]
        return nodes

    def backwards(self, stage: int) -> Codes:
        """The nodes of a stage's backwards for inputs (or full ones), by micro-batch."""
        nodes: Codes = self.table[_INPUT, stage + 1]
        return nodes

    def span(self, rank: int) -> slice:
        """A rank's nodes."""
        return slice(int(self.first[rank]), int(self.first[rank + 1]))

    def where(self, node: int) -> tuple[int, int, Action]:
        """A node's rank, its place in that rank's row, and the action."""
        rank = int(np.searchsorted(self.first, node, "right")) - 1
        index = node - int(self.first[rank])
        place = int(np.flatnonzero(kinds(self.schedule.codes[rank]) <= max(COMPUTE))[index])
        return rank, place, unpack(self.rows[rank][index : index + 1])[0]


def check_ids(schedule: Schedule) -> None:
    """Raises an error for actions of stages and micro-batches that do not exist, and actions on a wrong rank."""
    placement = np.array(schedule.placement)
    for rank, row in enumerate(schedule.codes):
        stage, microbatch = stages(row), microbatches(row)
        wrong = (stage >= schedule.stages) | (microbatch >= schedule.microbatches)
        wrong |= placement[np.minimum(stage, schedule.stages - 1)] != rank
        if wrong.any():
            place = int(wrong.argmax())
            if stage[place] >= schedule.stages:
                why = f"is of stage {stage[place]}, but there are {schedule.stages}, counted from 0"
            elif microbatch[place] >= schedule.microbatches:
                why = f"is of micro-batch {microbatch[place]}, but there are {schedule.microbatches}, counted from 0"
            else:
                why = f"belongs on rank {schedule.placement[stage[place]]}, which holds stage {stage[place]}"
            raise ScheduleError.at(row, place, why, rank=rank)


def enter(table: Codes, keys: Codes, values: Codes, row: Codes, places: Codes, rank: int) -> None:
    """Writes values into a table, and raises an error for a duplicate key.

    Args:
        table: changed in place.
        keys, values: where to write what.
        row: a rank's actions, packed.
        places: in the row, of the action behind each key.
        rank: whose row it is.
    """
    table[keys] = values
    twice = table[keys] != values  # the last of equal keys has won
    if twice.any():
        first = int(twice.argmax())
        again = first + 1 + int((keys[first + 1 :] == keys[first]).argmax())
        earlier = unpack(row[places[first : first + 1]])[0]
        why = f"is there again: {earlier} at place {places[first]} has done it"
        raise ScheduleError.at(row, places[again], why, rank=rank)


def build_graph(schedule: Schedule, *, training: bool | None = None) -> Graph:
    """The graph of a schedule. Each action must occur once, on its rank, after what it needs of the same rank.

    Args:
        schedule: lowered or not.
        training: whether there must be backwards; by default, whether there is one.

    Raises:
        ScheduleError: an action is invalid, missing, duplicated, or too early in its row.
        TypeError: ``schedule`` is not a Schedule.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule={schedule!r} is not a Schedule; make one with Schedule.of(rows), from_csv(path) or a generator"
        )
    check_ids(schedule)
    count, m = schedule.stages, schedule.microbatches
    table = np.full((3, count + 2, m), -1, np.int64)
    flat, rows, first = table.reshape(-1), [], [0]
    for rank, row in enumerate(schedule.codes):
        places = np.flatnonzero(kinds(row) <= max(COMPUTE))
        chosen = row if len(places) == len(row) else row[places]
        keys = (_SLOT[kinds(chosen)] * (count + 2) + stages(chosen) + 1) * m + microbatches(chosen)
        enter(flat, keys, np.arange(first[-1], first[-1] + len(chosen)), row, places, rank)
        rows.append(chosen)
        first.append(first[-1] + len(chosen))
    offsets = np.array(first)
    backs = bool((table[_INPUT] >= 0).any() or (table[_WEIGHT] >= 0).any())
    table[:, (0, -1)] = offsets[-1]  # nodes of the first stage, or backwards of the last, wait for nothing
    before = np.concatenate([_before(table, row, offsets[-1]) for row in rows])
    graph = Graph(schedule, tuple(rows), offsets, table, before)
    _check_complete(graph, training=backs if training is None else training)
    _check_order(graph)
    return graph


def _check_complete(graph: Graph, *, training: bool) -> None:
    def refuse_missing(there: npt.NDArray[np.bool_], kind: Kind, why: str) -> None:
        if not there.all():
            stage, microbatch = (int(x) for x in np.argwhere(~there)[0])
            rank = graph.schedule.placement[stage]
            raise ScheduleError(f"is missing; {why}", action=Action(kind, stage, microbatch), rank=rank)

    forward, back, weight = graph.table[:, 1:-1]
    refuse_missing(forward >= 0, Kind.F, "each stage forwards each micro-batch once")
    if not training:
        if (back >= 0).any() or (weight >= 0).any():
            rank, place, action = graph.where(int(np.maximum(back, weight).max()))
            raise ScheduleError(
                "is a backward; without training there are forwards only", action=action, rank=rank, place=place
            )
        return
    split = np.concatenate([kinds(row) == Kind.I for row in graph.rows])
    split = split[back] if len(split) else back < 0
    twice = (weight >= 0) & (back >= 0) & ~split
    if twice.any():
        rank, place, action = graph.where(int(weight[twice].min()))
        full = Action(Kind.B, action.stage, action.microbatch)
        raise ScheduleError(f"is there again: {full} has done it; split it into I and W", action=action, rank=rank, place=place)
    refuse_missing((back >= 0) | (weight < 0), Kind.I, "the backward for weights builds on it")
    refuse_missing(back >= 0, Kind.B, "each stage needs a backward of each micro-batch: B, or I and later W")
    refuse_missing((weight >= 0) | ~split, Kind.W, "I leaves the weights' gradients to it")


def _before(table: Codes, row: Codes, none: int) -> Codes:
    slots = _SLOT[kinds(row)]
    neighbour = stages(row) + 1 + np.array([-1, 1, 0])[slots]
    nodes = table[slots, neighbour, microbatches(row)]
    return np.where((slots == _WEIGHT) | (nodes < 0), none, nodes)


def _check_order(graph: Graph) -> None:
    """Raises an error for a node that comes before a node of its own rank that it needs."""
    placement = np.array([-1, *graph.schedule.placement, -1])
    for rank, row in enumerate(graph.rows):
        span = graph.span(rank)
        nodes, stage, slots = np.arange(span.start, span.stop), stages(row), _SLOT[kinds(row)]
        prior = graph.table[np.maximum(slots - 1, 0), stage + 1, microbatches(row)]  # B and I need F, W needs I
        early = (slots > _FORWARD) & (prior > nodes)
        neighbour = placement[stage + 1 + np.array([-1, 1, 0])[slots]]
        early_neighbour = (slots < _WEIGHT) & (neighbour == rank) & (graph.before[span] > nodes)
        if (early | early_neighbour).any():
            index = int((early | early_neighbour).argmax())
            needs = prior[index] if early[index] else graph.before[span][index]
            _, place, action = graph.where(int(nodes[index]))
            _, later, needed = graph.where(int(needs))
            why = f"needs {needed}, which comes after it, at place {later}"
            raise ScheduleError(why, action=action, rank=rank, place=place)


def sent_graph(graph: Graph) -> Graph:
    """The graph in which a node waits for the last node before the send of its value, if the schedule has sends."""
    before = np.append(graph.before, graph.size)  # one more for values that no node waits for
    for rank, row in enumerate(graph.schedule.codes):
        kind = kinds(row)
        places = np.flatnonzero((kind == Kind.SEND_F) | (kind == Kind.SEND_B))
        slot, onward = np.where(kind[places] == Kind.SEND_F, [[_FORWARD], [1]], [[_INPUT], [-1]])
        to = graph.table[slot, stages(row)[places] + 1 + onward, microbatches(row)[places]]
        done = graph.first[rank] + (kind <= max(COMPUTE)).cumsum()[places] - 1
        before[to] = np.maximum(before[to], done)
    return attrs.evolve(graph, before=before[:-1])


def weights_done(graph: Graph, stage: int) -> Codes:
    """The nodes that complete the gradients of a stage's weights, by micro-batch: W, or B."""
    nodes: Codes = np.maximum(graph.table[_WEIGHT, stage + 1], graph.backwards(stage))
    return nodes


Floats = npt.NDArray[np.float64]


def earliest_times(
    graph: Graph, duration: Floats, delay: Floats | None = None, gates: tuple[Codes, Floats] | None = None
) -> tuple[Floats, Floats]:
    """When each node starts and ends, if each rank executes its row in order and each node starts as soon as possible.

    All ranks that can continue do so together, in one operation on arrays, so the Python loop is as long as the longest chain
    of nodes that wait for each other.

    Args:
        graph: the nodes.
        duration: of each node.
        delay: for each node, how long its input is in transit.
        gates: for each node another one, earlier in its own row, and how long after that one's end it may start.

    Raises:
        ScheduleError: ranks wait for each other; the cycle is in the message.
    """
    size, before, stop = graph.size, graph.before, graph.first[1:]
    start, end = np.zeros(size), np.full(size + 1, np.inf)
    end[size] = 0.0  # stands for "nothing to wait for"
    head, clock = graph.first[:-1].copy(), np.zeros(len(stop))  # each rank's next node, and when the rank is free
    active = np.flatnonzero(head < stop)
    while active.size:
        nodes = head[active]
        arrival = end[before[nodes]]
        if delay is not None:
            arrival = arrival + delay[nodes]
        begin = np.maximum(clock[active], arrival)
        if gates is not None:
            begin = np.maximum(begin, end[gates[0][nodes]] + gates[1][nodes])
        ready = begin < np.inf
        if not ready.all():
            begin, nodes, go = begin[ready], nodes[ready], active[ready]
            if not go.size:
                raise cycle_error(int(active[0]), lambda rank: _wait(graph, head, rank))
        else:
            go = active
        start[nodes] = begin
        end[nodes] = clock[go] = begin + duration[nodes]
        head[go] = nodes + 1
        if (nodes + 1 == stop[go]).any():
            active = active[head[active] < stop[active]]
    return start, end[:size]


@attrs.frozen
class Wait:
    """Where a rank waits, and for whom.

    Attributes:
        place: in its row.
        action: what it waits with.
        why: what it waits for, as text.
        other: the rank that it waits for.
    """

    place: int
    action: Action
    why: str
    other: int


def _wait(graph: Graph, head: Codes, rank: int) -> Wait:
    _, place, action = graph.where(int(head[rank]))
    other, later, needed = graph.where(int(graph.before[head[rank]]))
    return Wait(place, action, f"waits for {needed}, at place {later} of rank {other}", other)


def cycle_error(stuck: int, wait: Callable[[int], Wait]) -> ScheduleError:
    """The error that lists a cycle: follows, from a stuck rank, who waits for whom until a rank repeats.

    Args:
        stuck: a rank that waits forever.
        wait: where each stuck rank waits.
    """
    rank, path = stuck, list[int]()
    while rank not in path:
        path.append(rank)
        rank = wait(rank).other
    cycle = [(member, wait(member)) for member in path[path.index(rank) :]]
    lines = [f"rank {member} at place {reason.place}: {reason.action} {reason.why}" for member, reason in cycle]
    first = cycle[0][1]
    return ScheduleError("waits in a cycle:\n  " + "\n  ".join(lines), action=first.action, rank=rank, place=first.place)
