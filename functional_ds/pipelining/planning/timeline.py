"""``timeline``: when each action of a schedule starts and ends, and what memory it takes."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import attrs
import numpy as np

from functional_ds.pipelining.schedules.action import Action, Codes, Kind, kinds, stages, unpack
from functional_ds.pipelining.schedules.graph import Floats, Graph, as_sent, graph, sweep
from functional_ds.pipelining.schedules.schedule import Schedule

from .costs import Costs

__all__ = ["Span", "Timeline", "measured", "observed", "timeline"]


class Span(NamedTuple):
    """An action with its time on its rank."""

    rank: int
    action: Action
    start: float
    end: float


@attrs.frozen(eq=False, repr=False, slots=False)  # with slots, nothing could be cached
class Timeline:
    """A schedule with the start and end of every action, predicted or observed.

    Attributes:
        schedule: what was timed.
        costs: what it was timed with; for memory, and for the times of messages.
    """

    schedule: Schedule
    costs: Costs
    _graph: Graph
    _start: Floats
    _end: Floats

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the end of the last action, reductions included."""
        last = float(self._end.max(initial=0.0))
        reduces = [span.end for rank in self._with_reduces for span in self.spans(rank) if span.action.kind is Kind.REDUCE]
        return max([last, *reduces])

    @property
    def _with_reduces(self) -> list[int]:
        if not np.any(np.asarray(self.costs.reduce)):
            return []
        return [rank for rank, row in enumerate(self.schedule.codes) if (kinds(row) == Kind.REDUCE).any()]

    @property
    def bubble(self) -> float:
        """The part of the makespan in which a rank does not compute, on average."""
        whole = self.schedule.ranks * self.makespan
        return float(1 - (self._end - self._start).sum() / whole) if whole else 0.0

    @cached_property
    def gaps(self) -> tuple[float, ...]:
        """Each rank's idle time between its first compute action and its last."""
        found = []
        for rank in range(self.schedule.ranks):
            start, end = self.times(rank)
            found.append(float(end[-1] - start[0] - (end - start).sum()) if len(start) else 0.0)
        return tuple(found)

    def times(self, rank: int) -> tuple[Floats, Floats]:
        """Starts and ends of a rank's compute actions, as arrays."""
        span = self._graph.span(rank)
        return self._start[span], self._end[span]

    def spans(self, rank: int) -> list[Span]:
        """A rank's actions with their times.

        A message goes on beside the computing: a send from the end of what computes it until it has arrived, a receive from
        when the rank has come to it until then. So do gathers and reductions.
        """
        row = self.schedule.codes[rank]
        is_compute = kinds(row) <= Kind.B
        start, end = np.empty(len(row)), np.empty(len(row))
        start[is_compute], end[is_compute] = self.times(rank)
        if not is_compute.all():
            done = np.append(0.0, self.times(rank)[1])[is_compute.cumsum()]  # when the compute action before it was over
            for place in np.flatnonzero(~is_compute):
                start[place] = done[place]
            for place, action in zip(np.flatnonzero(~is_compute), unpack(row[~is_compute]), strict=True):
                end[place] = max(done[place], self._until(action, done[place]))
        return [Span(rank, *each) for each in zip(unpack(row), start.tolist(), end.tolist(), strict=True)]

    def _until(self, action: Action, begun: float) -> float:
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
        """Bytes of activations over time: ``bytes[i]`` from ``times[i]`` to ``times[i + 1]``."""
        start, end = self.times(rank)
        taken, freed = self._changes(rank)
        # a rank's actions follow one another, so this is the order in time
        times, changes = np.stack([start, end], axis=1).ravel(), np.stack([taken, -freed], axis=1).ravel()
        return np.append(0.0, times), np.append(0.0, changes.cumsum())

    def _changes(self, rank: int) -> tuple[Floats, Floats]:
        row, count = self._graph.rows[rank], self.schedule.stages
        kind, stage = kinds(row), stages(row)
        taken = np.where(kind == Kind.F, self.costs.of("activations", count)[stage], 0.0)
        if not self._trains:
            return taken, taken  # an inference keeps nothing
        return taken, self.costs.freed(count)[stage, kind]

    @cached_property
    def _trains(self) -> bool:
        return any(bool((kinds(row) != Kind.F).any()) for row in self._graph.rows)

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """Each rank's largest number of bytes of activations."""
        return tuple(float(self.memory(rank)[1].max()) for rank in range(self.schedule.ranks))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """A chain of compute actions, each held up by the one before, to the last one's end: what to shorten."""
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


def timeline(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When each action starts and ends if every rank takes its row in order, each action as soon as it can.

    A compute action starts when the one before it on its rank is over and what it needs has come: end + α + bytes β for a
    value from another rank, the end of the last action before its send, where the schedule has sends. Messages go on beside
    the computing, and links are not shared; a gather, where the schedule has them, holds up only the actions that use what
    it gathers.

    Args:
        schedule: of compute actions, or lowered.
        costs: by default units.

    Raises:
        ScheduleError: an action is wrong, missing, there twice or too early, or ranks wait for each other in a cycle.
        ValueError: a cost is given for another number of stages.

    >>> from functional_ds.pipelining import one_f_one_b
    >>> timed = timeline(one_f_one_b(4, 8))
    >>> timed.makespan, timed.bubble == (4 - 1) / (8 + 4 - 1), timed.peak
    (33.0, True, (4.0, 3.0, 2.0, 1.0))
    >>> timeline(one_f_one_b(4, 8), Costs(forward=[1, 1, 1, 2])).makespan
    41.0
    """
    costs = costs or Costs()
    made = as_sent(graph(schedule))
    seconds = costs.seconds(schedule.stages)
    duration = np.concatenate([seconds[stages(row), kinds(row)] for row in made.rows])
    crossing = costs.crossing(schedule.stages)
    delay = _delays(schedule, costs, made) if crossing.any() else None
    gates = _gates(schedule, costs, made) if np.any(np.asarray(costs.gather)) else None
    return Timeline(schedule, costs, made, *sweep(made, duration, delay, gates))


def observed(schedule: Schedule, times: Sequence[Sequence[tuple[float, float]]], costs: Costs | None = None) -> Timeline:
    """The timeline of a run: for each rank the start and end of each of its compute actions, in their order.

    The earliest start becomes time 0. ``costs`` says what memory is predicted; it has nothing to do with the times.

    Raises:
        ScheduleError: as ``timeline``.
        ValueError: times for another number of ranks or actions, or times of one rank that overlap.

    >>> from functional_ds.pipelining import gpipe
    >>> run = observed(gpipe(1, 2), [[(5.0, 6.0), (6.0, 7.5), (7.5, 9.0), (9.0, 11.0)]])
    >>> run.makespan, measured(run).forward, measured(run).backward
    (6.0, (1.25,), (1.75,))
    """
    schedule = schedule.compute_only()
    made = graph(schedule)
    counts = [len(row) for row in made.rows]
    if [len(each) for each in times] != counts:
        raise ValueError(f"times have {[len(each) for each in times]} pairs for the ranks; the schedule has {counts} actions")
    flat = np.array([pair for each in times for pair in each], np.float64).reshape(-1, 2)
    flat -= flat[:, 0].min(initial=np.inf) if len(flat) else 0.0
    for rank in range(schedule.ranks):
        order = flat[made.span(rank)].ravel()  # start, end, start, end, ...
        back = np.diff(order) < -1e-9 * order.max(initial=0.0)
        if back.any():
            place = (int(back.argmax()) + 1) // 2
            raise ValueError(f"times[{rank}][{place}]={times[rank][place]}: {schedule[rank][place]} starts or ends too early")
    return Timeline(schedule, costs or Costs(), made, flat[:, 0].copy(), flat[:, 1].copy())


def measured(run: Timeline, costs: Costs | None = None) -> Costs:
    """Costs with the mean times of a run's actions; the rest is that of ``costs``, and so are kinds that did not occur."""
    costs = costs or run.costs
    count = run.schedule.stages
    sums, occurrences = np.zeros((count, 4)), np.zeros((count, 4))
    for rank, row in enumerate(run._graph.rows):
        start, end = run.times(rank)
        np.add.at(sums, (stages(row), kinds(row)), end - start)
        np.add.at(occurrences, (stages(row), kinds(row)), 1)
    mean = np.where(occurrences > 0, sums / np.maximum(occurrences, 1), costs.seconds(count))
    fields = ("forward", "inputs", "weights", "backward")
    changes: dict[str, Any] = {name: mean[:, i] for i, name in enumerate(fields) if occurrences[:, i].any()}
    return attrs.evolve(costs, **changes)


def _delays(schedule: Schedule, costs: Costs, made: Graph) -> Floats:
    """Seconds between the end of what a node waits for and its start: a message, if the two are on different ranks."""
    crossing = costs.crossing(schedule.stages)
    placement = np.array([-1, *schedule.placement, -1])
    parts = []
    for rank, row in enumerate(made.rows):
        kind, stage = kinds(row), stages(row)
        source = np.where(kind == Kind.W, -1, placement[stage + 1 + np.where(kind == Kind.F, -1, 1)])
        boundary = np.where(kind == Kind.F, stage - 1, stage)
        parts.append(np.where((source >= 0) & (source != rank), crossing[boundary], 0.0))
    return np.concatenate(parts)


def _gates(schedule: Schedule, costs: Costs, made: Graph) -> tuple[Codes, Floats]:
    """For the first use of each gathered stage: the node that was over when the gather began, and how long it takes."""
    seconds = costs.of("gather", schedule.stages)
    gate, delay = np.full(made.size, made.size), np.zeros(made.size)
    for rank, row in enumerate(schedule.codes):
        compute = kinds(row) <= Kind.B
        done, first = compute.cumsum(), int(made.first[rank])
        own = stages(made.rows[rank])
        for place in np.flatnonzero(kinds(row) == Kind.GATHER):
            stage = int(stages(row[place : place + 1])[0])
            uses = np.flatnonzero(own[done[place] :] == stage)
            if len(uses):
                use = first + int(done[place]) + int(uses[0])
                gate[use] = first + done[place] - 1 if done[place] else made.size
                delay[use] = seconds[stage]
    return gate, delay
