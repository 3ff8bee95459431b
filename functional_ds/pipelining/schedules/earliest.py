"""``earliest_times``: when each compute action can start; and the error that names a cycle of waiting ranks."""

from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from .action import Action, Codes
from .graph import Graph
from .schedule import ScheduleError

__all__ = ["Floats", "Wait", "cycle_error", "earliest_times"]

Floats = npt.NDArray[np.float64]


def earliest_times(
    graph: Graph, duration: Floats, delay: Floats | None = None, gates: tuple[Codes, Floats] | None = None
) -> tuple[Floats, Floats]:
    """When each node starts and ends, if each rank takes its row in order and each node starts as soon as it can.

    All ranks that can go on do so together, as one operation on arrays. So the Python loop is as long as the longest chain of
    nodes that wait for each other, not as their number.

    Args:
        graph: the nodes.
        duration: of each node.
        delay: for each node, how long the value that it waits for travels.
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
    """The error that lists a cycle: from a rank that is stuck, follows who waits for whom until a rank comes again.

    Args:
        stuck: a rank that waits for ever.
        wait: where each stuck rank waits.
    """
    rank, path = stuck, list[int]()
    while rank not in path:
        path.append(rank)
        rank = wait(rank).other
    cycle = [(each, wait(each)) for each in path[path.index(rank) :]]
    lines = [f"rank {each} at place {found.place}: {found.action} {found.why}" for each, found in cycle]
    first = cycle[0][1]
    return ScheduleError("waits in a cycle:\n  " + "\n  ".join(lines), action=first.action, rank=rank, place=first.place)
