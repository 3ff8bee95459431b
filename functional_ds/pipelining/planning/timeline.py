"""``timeline``: when each action of a schedule starts and ends, and how much memory each rank holds."""

from functools import cached_property
from typing import NamedTuple

import attrs
import numpy as np

from functional_ds.comm.debug.page import Chart
from functional_ds.comm.debug.trace import Slice
from functional_ds.pipelining.schedules.action import Action, Codes, Kind, kinds, stages, unpack
from functional_ds.pipelining.schedules.graph import Floats, Graph, build_graph, earliest_times, sent_graph, weights_done
from functional_ds.pipelining.schedules.schedule import Schedule

from .costs import Costs

_SHOWN_RANKS = 32


class Span(NamedTuple):
    """An action with its start and end (seconds) on its rank.

    >>> from functional_ds.pipelining import one_f_one_b
    >>> [(str(span.action), span.start, span.end) for span in timeline(one_f_one_b(2, 1)).spans(0)]
    [('0F0', 0.0, 1.0), ('0B0', 4.0, 6.0)]
    """

    rank: int
    action: Action
    start: float
    end: float


class WaitSpan(NamedTuple):
    """What a rank waited for, and when (seconds).

    Attributes:
        action: the message that was awaited (``RECV_F``, ``RECV_B``), or that was being sent (``SEND_F``, ``SEND_B``), or the
            gather.
        source: the message's other rank; None for a gather.
        start, end: of the wait.
    """

    action: Action
    source: int | None
    start: float
    end: float


@attrs.frozen(eq=False, repr=False, slots=False)  # with slots, nothing could be cached
class Timeline:
    """A schedule with the start and end of every action, predicted or observed.

    Attributes:
        schedule: the schedule that was timed.
        costs: the stages' costs, for memory and for the times of messages.
        waits: of a run, what each rank waited for, if recorded.

    >>> from functional_ds.pipelining import one_f_one_b
    >>> timed = timeline(one_f_one_b(2, 3))
    >>> timed
    <Timeline: 2 ranks, 3 micro-batches, makespan 12, bubble 25.0%, peak 2>
    >>> print(timed)
    makespan 12, bubble 25.0%, peak memory 2
    rank 0 |F0F1....B0--F2B1--..B2--|
    rank 1 |..F0B0--F1B1--F2B2--....|
    """

    schedule: Schedule
    costs: Costs
    _graph: Graph
    _start: Floats
    _end: Floats
    waits: tuple[tuple[WaitSpan, ...], ...] = ()

    @cached_property
    def makespan(self) -> float:
        """Seconds from time 0 to the end of the last action, reductions included."""
        last = float(self._end.max(initial=0.0))
        if not np.any(np.asarray(self.costs.reduce)):
            return last
        spans = (
            s for rank, row in enumerate(self.schedule.codes) if (kinds(row) == Kind.REDUCE).any() for s in self.spans(rank)
        )
        return max([last, *(span.end for span in spans if span.action.kind is Kind.REDUCE)])

    @property
    def bubble(self) -> float:
        """The fraction of the makespan in which a rank does not compute, on average."""
        whole = self.schedule.ranks * self.makespan
        return float(1 - (self._end - self._start).sum() / whole) if whole else 0.0

    @cached_property
    def least_bubble(self) -> float:
        """The bubble if each action took as long as here, and began as soon as its rank and inputs were ready.

        Law: ``bubble >= least_bubble``.
        """
        duration = self._end - self._start
        whole = self.schedule.ranks * float(earliest_times(self._graph, duration)[1].max(initial=0.0))
        return float(1 - duration.sum() / whole) if whole else 0.0

    @cached_property
    def gaps(self) -> tuple[float, ...]:
        """Each rank's idle time between its first compute action and its last."""
        idle = []
        for rank in range(self.schedule.ranks):
            start, end = self.times(rank)
            idle.append(float(end[-1] - start[0] - (end - start).sum()) if len(start) else 0.0)
        return tuple(idle)

    def times(self, rank: int) -> tuple[Floats, Floats]:
        """Starts and ends of a rank's compute actions, as arrays."""
        span = self._graph.span(rank)
        return self._start[span], self._end[span]

    def spans(self, rank: int) -> list[Span]:
        """A rank's actions with their times.

        Messages, gathers and reductions overlap with computing. Each starts at the end of the compute action before it. A
        message ends when it has arrived.
        """
        row = self.schedule.codes[rank]
        is_compute = kinds(row) <= Kind.B
        start, end = np.empty(len(row)), np.empty(len(row))
        start[is_compute], end[is_compute] = self.times(rank)
        if not is_compute.all():
            done = np.append(0.0, self.times(rank)[1])[is_compute.cumsum()]  # the end of the compute action before each
            start[~is_compute] = done[~is_compute]
            for place, action in zip(np.flatnonzero(~is_compute), unpack(row[~is_compute]), strict=True):
                end[place] = max(done[place], self._until(action, done[place]))
        return [Span(rank, *fields) for fields in zip(unpack(row), start.tolist(), end.tolist(), strict=True)]

    def _until(self, action: Action, begun: float) -> float:
        """The end of a message, gather, eviction or reduction."""
        kind, stage, microbatch = action
        if kind in (Kind.GATHER, Kind.REDUCE, Kind.EVICT):
            name = {Kind.GATHER: "gather", Kind.REDUCE: "reduce"}.get(kind)
            return begun + (float(self.costs.of(name, self.schedule.stages)[stage]) if name else 0.0)
        onward = kind in (Kind.SEND_F, Kind.RECV_B)  # between this stage and the next
        crossing = float(self.costs.crossing(self.schedule.stages)[stage if onward else stage - 1])
        if kind in (Kind.SEND_F, Kind.SEND_B):
            return begun + crossing
        nodes = self._graph.forwards(stage) if kind is Kind.RECV_F else self._graph.backwards(stage)
        return float(self._end[self._graph.before[nodes[microbatch]]]) + crossing

    def memory(self, rank: int) -> tuple[Floats, Floats]:
        """A rank's activations as (times, bytes): ``bytes[i]`` from ``times[i]`` to ``times[i + 1]``."""
        start, end = self.times(rank)
        taken, freed = self._changes(rank)
        # in the order of time, because a rank's actions follow one another
        times, changes = np.stack([start, end], axis=1).ravel(), np.stack([taken, -freed], axis=1).ravel()
        return np.append(0.0, times), np.append(0.0, changes.cumsum())

    def _changes(self, rank: int) -> tuple[Floats, Floats]:
        """The bytes that each compute action takes at its start and frees at its end."""
        row, count = self._graph.rows[rank], self.schedule.stages
        kind, stage = kinds(row), stages(row)
        shared = self.costs.shared_on(self.schedule.placement)
        taken = np.where(kind == Kind.F, (self.costs.of("activations", count) - shared)[stage], 0.0)
        if not self._trains:
            return taken, taken  # inference keeps nothing
        freed = self.costs.freed(count)[stage, kind]
        for later in np.flatnonzero(shared):
            if self.schedule.placement[later] == rank:  # the memory goes with the last of both stages' backwards
                done = np.minimum(weights_done(self._graph, int(later) - 1), weights_done(self._graph, int(later)))
                freed[done - self._graph.span(rank).start] -= shared[later]
        return taken, freed

    @cached_property
    def _trains(self) -> bool:
        return any(bool((kinds(row) != Kind.F).any()) for row in self._graph.rows)

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """Each rank's largest number of bytes of activations."""
        return tuple(float(self.memory(rank)[1].max()) for rank in range(self.schedule.ranks))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of compute actions that determines the makespan: each waits for the one before."""
        if not self._graph.size:
            return ()
        delay, node, path = _delays(self.schedule, self.costs, self._graph), int(self._end.argmax()), list[Span]()
        while True:
            rank, _, action = self._graph.where(node)
            path.append(Span(rank, action, float(self._start[node]), float(self._end[node])))
            earlier = node - 1 if node > self._graph.first[rank] else None
            other = int(self._graph.before[node])
            if other < self._graph.size and (earlier is None or self._end[other] + delay[node] >= self._end[earlier]):
                node = other
            elif earlier is not None:
                node = earlier
            else:
                return tuple(reversed(path))

    def __repr__(self) -> str:
        size = f"{self.schedule.ranks} ranks, {self.schedule.microbatches} micro-batches"
        return f"<Timeline: {size}, makespan {self.makespan:g}, bubble {self.bubble:.1%}, peak {max(self.peak):g}>"

    def text(self, *, width: int = 100, ranks: int | None = None) -> str:
        """A line for each rank: time from left to right, dots where the rank is idle.

        Each action shows its kind and, if they fit, its micro-batch and its length. A rank's later stages have lower-case
        letters.

        Args:
            width: the most columns for the makespan.
            ranks: how many are shown; None for all.

        >>> from functional_ds.pipelining import one_f_one_b, timeline
        >>> print(timeline(one_f_one_b(2, 3)).text(width=24))
        makespan 12, bubble 25.0%, peak memory 2
        rank 0 |F0F1....B0--F2B1--..B2--|
        rank 1 |..F0B0--F1B1--F2B2--....|
        """
        durations = self._end - self._start
        shortest = float(durations[durations > 0].min(initial=self.makespan or 1.0))
        scale = min(width / (self.makespan or 1.0), 2 / shortest)
        lines = [f"makespan {self.makespan:g}, bubble {self.bubble:.1%}, peak memory {max(self.peak):g}"]
        label = len(f"rank {self.schedule.ranks - 1}")
        shown = min(ranks or self.schedule.ranks, self.schedule.ranks)
        lines += [f"{f'rank {rank}':<{label}} |{self._line(rank, scale)}|" for rank in range(shown)]
        if shown < self.schedule.ranks:
            lines.append(f"... and {self.schedule.ranks - shown} more ranks")
        return "\n".join(lines)

    def _line(self, rank: int, scale: float) -> str:
        line = ["."] * round(self.makespan * scale)
        rank_stages = self.schedule.stages_of(rank)
        for span in self.spans(rank):
            if span.action.kind > Kind.B:
                continue
            start, stop = round(span.start * scale), round(span.end * scale)
            letter = span.action.kind.name if span.action.stage == rank_stages[0] else span.action.kind.name.lower()
            name = f"{letter}{span.action.microbatch}"
            line[start:stop] = (name if len(name) <= stop - start else letter)[: stop - start].ljust(stop - start, "-")
        return "".join(line)

    def __str__(self) -> str:
        return self.text(ranks=_SHOWN_RANKS)

    def chart(self, *, ranks: int | None = None) -> Chart:
        """The compute actions as a chart, a lane for each rank; ``ranks`` of them, None for all."""
        lanes = {
            f"rank {rank}": [
                Slice("", span.action.kind.name, span.start, span.end, {"action": span.action})
                for span in self.spans(rank)
                if span.action.kind <= Kind.B
            ]
            for rank in range(min(ranks or self.schedule.ranks, self.schedule.ranks))
        }
        return Chart(f"makespan {self.makespan:g}, bubble {self.bubble:.1%}, peak memory {max(self.peak):g}", lanes, unit="")

    def _repr_html_(self) -> str:
        return self.chart(ranks=_SHOWN_RANKS)._repr_html_()


def timeline(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When each action starts and ends, if every rank executes its row in order and each action starts as soon as possible.

    A compute action starts when the previous one on its rank is over and its input has arrived. A value from another rank
    arrives latency + bytes / bandwidth after its action's end (if the schedule has sends, after the end of the last action
    before the send). Messages overlap computation, and links are not shared. A gather delays only the actions that use its
    stage.

    Args:
        schedule: of compute actions, or lowered.
        costs: of each stage; by default one unit of time for F, I and W, two for B.

    Raises:
        ScheduleError: an action is invalid, missing, duplicated or too early, or ranks wait for each other in a cycle.
        ValueError: a cost is given for another number of stages.

    >>> from functional_ds.pipelining import one_f_one_b
    >>> timed = timeline(one_f_one_b(4, 8))
    >>> timed.makespan, timed.bubble == (4 - 1) / (8 + 4 - 1), timed.peak
    (33.0, True, (4.0, 3.0, 2.0, 1.0))
    >>> timeline(one_f_one_b(4, 8), Costs(forward=[1, 1, 1, 2])).makespan
    41.0
    """
    costs = costs or Costs()
    graph = sent_graph(build_graph(schedule))
    seconds = costs.seconds(schedule.stages)
    duration = np.concatenate([seconds[stages(row), kinds(row)] for row in graph.rows])
    crossing = costs.crossing(schedule.stages)
    delay = _delays(schedule, costs, graph) if crossing.any() else None
    gates = _gates(schedule, costs, graph) if np.any(np.asarray(costs.gather)) else None
    return Timeline(schedule, costs, graph, *earliest_times(graph, duration, delay, gates))


def _delays(schedule: Schedule, costs: Costs, graph: Graph) -> Floats:
    """For each node, the seconds for which its value is in transit: none if it was computed on the same rank."""
    crossing = costs.crossing(schedule.stages)
    placement = np.array([-1, *schedule.placement, -1])
    parts = []
    for rank, row in enumerate(graph.rows):
        kind, stage = kinds(row), stages(row)
        source = np.where(kind == Kind.W, -1, placement[stage + 1 + np.where(kind == Kind.F, -1, 1)])
        boundary = np.where(kind == Kind.F, stage - 1, stage)
        parts.append(np.where((source >= 0) & (source != rank), crossing[boundary], 0.0))
    return np.concatenate(parts)


def _gates(schedule: Schedule, costs: Costs, graph: Graph) -> tuple[Codes, Floats]:
    """For each node that is the first to use a gathered stage: the node before the gather, and the gather's seconds."""
    seconds = costs.of("gather", schedule.stages)
    gate, delay = np.full(graph.size, graph.size), np.zeros(graph.size)
    for rank, row in enumerate(schedule.codes):
        compute = kinds(row) <= Kind.B
        done, first = compute.cumsum(), int(graph.first[rank])
        row_stages = stages(graph.rows[rank])
        for place in np.flatnonzero(kinds(row) == Kind.GATHER):
            stage = int(stages(row[place : place + 1])[0])
            uses = np.flatnonzero(row_stages[done[place] :] == stage)
            if len(uses):
                use = first + int(done[place]) + int(uses[0])
                gate[use] = first + done[place] - 1 if done[place] else graph.size
                delay[use] = seconds[stage]
    return gate, delay
