"""``observed``: the timeline of a run; ``measured``: the costs measured in it."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from functional_ds.pipelining.schedules.action import kinds, stages
from functional_ds.pipelining.schedules.graph import Floats, Graph, build_graph
from functional_ds.pipelining.schedules.schedule import Schedule

from .costs import Costs
from .timeline import Timeline, WaitSpan

_ROUNDING = 1e-9  # of the largest time


def observed(
    schedule: Schedule,
    times: Sequence[Sequence[tuple[float, float]]],
    costs: Costs | None = None,
    *,
    waits: Sequence[Sequence[WaitSpan]] = (),
    error: float = 0.0,
) -> Timeline:
    """The timeline of a run. The earliest start becomes time 0.

    Args:
        schedule: what was run.
        times: for each rank the (start, end) of each of its compute actions, in their order, on one clock.
        costs: for the timeline's memory only; by default units.
        waits: for each rank what it waited for.
        error: seconds by which the clocks of two ranks may differ.

    Raises:
        ScheduleError: as ``timeline``.
        ValueError: times for another number of ranks or actions; times of one rank that overlap; an action that starts before
            what it needs has ended, by more than ``error``.

    >>> from functional_ds.pipelining import gpipe
    >>> run = observed(gpipe(1, 2), [[(5.0, 6.0), (6.0, 7.5), (7.5, 9.0), (9.0, 11.0)]])
    >>> run.makespan, measured(run).forward, measured(run).backward
    (6.0, (1.25,), (1.75,))
    """
    schedule = schedule.compute_only()
    graph = build_graph(schedule)
    counts = [len(row) for row in graph.rows]
    if [len(pairs) for pairs in times] != counts:
        raise ValueError(f"times have {[len(pairs) for pairs in times]} pairs for the ranks; the schedule has {counts} actions")
    flat = np.array([pair for pairs in times for pair in pairs], np.float64).reshape(-1, 2)
    zero = float(flat[:, 0].min()) if len(flat) else 0.0
    flat -= zero
    for rank in range(schedule.ranks):
        order = flat[graph.span(rank)].ravel()  # start, end, start, end, ...
        back = np.diff(order) < -_ROUNDING * order.max(initial=0.0)
        if back.any():
            place = (int(back.argmax()) + 1) // 2
            raise ValueError(f"times[{rank}][{place}]={times[rank][place]}: {schedule[rank][place]} starts or ends too early")
    start, end = flat[:, 0].copy(), flat[:, 1].copy()
    _refuse_early(graph, start, end, error)
    waited = tuple(
        tuple(wait._replace(start=wait.start - zero, end=wait.end - zero) for wait in waits[rank]) if waits else ()
        for rank in range(schedule.ranks)
    )
    return Timeline(schedule, costs or Costs(), graph, start, end, waited)


def _refuse_early(graph: Graph, start: Floats, end: Floats, error: float) -> None:
    """Raises an error for times that cannot be from one clock."""
    needed = np.append(end, -np.inf)[graph.before]
    early = needed - start
    worst = int(early.argmax()) if len(early) else 0
    if len(early) and early[worst] > error + _ROUNDING * float(end.max()):
        rank, place, action = graph.where(worst)
        other, _, source = graph.where(int(graph.before[worst]))
        raise ValueError(
            f"times[{rank}][{place}]: {action} starts {early[worst]:.3g} s before {source} on rank {other} has ended, which it "
            "needs; put the ranks' times on one clock (comm.debug.clock_offsets), as Recorder.run does"
        )


def measured(run: Timeline, costs: Costs | None = None) -> Costs:
    """Costs with the mean times of a run's actions; everything else, and absent kinds, as in ``costs`` (the run's).

    >>> from functional_ds.pipelining import gpipe
    >>> run = observed(gpipe(1, 2), [[(0.0, 1.0), (1.0, 2.5), (2.5, 4.0), (4.0, 6.0)]])
    >>> measured(run).forward, measured(run).backward
    ((1.25,), (1.75,))
    """
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
