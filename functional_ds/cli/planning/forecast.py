"""Predicts what a candidate holds, sends and takes on a machine, and whether it fits."""

from collections.abc import Sequence
from typing import Any

import attrs

from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.comm.algorithms.cost import Link
from functional_ds.comm.record.ledger import Row
from functional_ds.dry_run.events import Events
from functional_ds.dry_run.operations import SizedOperation
from functional_ds.jobs.entries.job_errors import JobError
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_subject import Subject
from functional_ds.jobs.strategy import data_axes, schedule_of, size
from functional_ds.memory.account import KINDS
from functional_ds.pipelining.planning.costs import Costs
from functional_ds.pipelining.planning.timeline import timeline
from functional_ds.pipelining.schedules.schedule import Schedule
from functional_ds.scaling.machine import Machine

from .admission import why_refused
from .candidate import as_dict, first_ranks, line_of
from .values_free_step import StepShape, step_shape

_THIRDS = 3  # a forward, and the two halves of its backward, take about as long each


def crosses(row: Row) -> bool:
    """Whether a row of the ledger is a message between stages."""
    return row.traffic.role == "message"


def once(row: Row, data: Sequence[str]) -> bool:
    """Whether a row is sent once a step, over the axes that sum gradients, or by all ranks of the pipeline."""
    axes = row.group.partition("/")[0].partition(":")[0]
    return axes in (",".join(data), "pp")


def bubble_seconds(
    schedule: Schedule, machine: Machine, busy: Sequence[float], beside: Sequence[float], messages: Sequence[Row]
) -> float:
    """Seconds in which the busiest rank does not compute in a step.

    The schedule is timed by ``pipelining.timeline``. A rank's stages share its computation equally, as do a stage's
    micro-batches.

    Law: if ranks are equally busy and messages take no time, it is one rank's ``busy`` times (p - 1) / m under 1F1B on p ranks.

    Args:
        schedule: of the pipeline.
        machine: for the links.
        busy: by rank, the seconds of computation and communication for its micro-batches.
        beside: by rank, the seconds of what it does once a step.
        messages: ledger rows of messages between stages.

    >>> from functional_ds.pipelining import one_f_one_b
    >>> here = Machine("m", flops=1e12, flops_fp32=1e12, memory_bandwidth=1e12, link_bandwidth=1e9)
    >>> round(bubble_seconds(one_f_one_b(2, 4), here, [8.0, 8.0], [0.0, 0.0], []), 3)
    2.0
    """
    of_rank = [sum(place == rank for place in schedule.placement) for rank in range(schedule.ranks)]
    per_action = [busy[rank] / (of_rank[rank] * schedule.microbatches * _THIRDS) for rank in schedule.placement]
    calls = sum(row.calls for row in messages)
    factor = machine.factors["communicate"]
    wire = machine.network.across if any(map(machine.crosses, messages)) else machine.network.inside
    link = Link(latency=factor * wire.latency, bandwidth=wire.bandwidth / max(factor, 1e-9))
    mean = sum(row.bytes for row in messages) / calls if calls else 0.0
    timed = timeline(schedule, Costs(forward=per_action, inputs=per_action, weights=per_action, link=link, message=mean))
    whole = timed.makespan + max(beside)
    return max(0.0, whole - max(computing + extra for computing, extra in zip(busy, beside, strict=True)))


def communicating_seconds(machine: Machine, events: Events) -> float:
    """Seconds of a step in which a rank communicates and does not compute.

    Collectives inside a node overlap nothing. Those between nodes share one link, which carries one after another concurrently
    with later operations, except for ``Machine.held_seconds``; the optimizer's kernel and the step's end wait for all of them.

    Law: it is at most the sum of all collectives, and at least what the link between nodes takes longer than the operations.

    Args:
        machine: the rates.
        events: operations and collectives in order.
    """
    now = link_free = waited = 0.0
    end, start = SizedOperation("update"), machine.start_seconds * machine.host_computes
    durations = {operation: start + machine.operation_seconds(operation) for operation in (*events.work, end)}
    for event in (*events, end):
        waits = spent = 0.0
        if isinstance(event, SizedOperation):
            spent = durations[event]
            waits = max(0.0, link_free - now) if event.kind == "update" else 0.0
        elif isinstance(event, Row) and machine.crosses(event):
            link_free = max(now, link_free) + machine.collective_seconds(event)
            waits = machine.held_seconds(event)
        elif isinstance(event, Row) and event.size > 1:
            waits = machine.collective_seconds(event)
        now, waited = now + waits + spent, waited + waits
    return waited


@attrs.frozen
class Forecast:
    """A candidate's prediction.

    Attributes:
        job: the candidate.
        shape: the dry run of its step, on the rank that needs the most memory.
        machine: where it would run; None if unknown.
        limit: bytes of a rank; 0 for none.
        stages: of a pipeline, the dry runs of its ranks' steps, by their places.
        line: the transforms as Python.
    """

    job: Job
    shape: StepShape
    machine: Machine | None = None
    limit: int = 0
    stages: tuple[StepShape, ...] = ()
    line: str = ""

    @property
    def peak(self) -> int:
        """The peak bytes."""
        return self.shape.peak

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return not self.limit or self.peak <= self.limit

    @property
    def why_not(self) -> str:
        """What exceeds the limit, and by how much; empty if it fits."""
        if self.fits:
            return ""
        kinds = {category: getattr(self.shape.memory, category) for category in KINDS} | {"activations": self.shape.activations}
        largest = max(kinds, key=lambda category: kinds[category])
        state = self.shape.memory.state
        held = "the state alone does" if state > self.limit else f"{largest} are the largest part"
        return (
            f"{self.peak - self.limit:,} bytes over the limit of {self.limit:,}: {held} ({kinds[largest]:,} bytes of {largest})"
        )

    @property
    def perfect_seconds(self) -> dict[str, float] | None:
        """The input of a fit of the machine's factors. None without a machine or a loss."""
        if self.machine is None or not self.shape.work:
            return None
        return self.machine.perfect_seconds(self.busiest.work, self._own_rows(self.busiest))

    @property
    def busiest(self) -> StepShape:
        """The step of the rank that takes longest."""
        return max(self.stages, key=lambda stage: sum(self._seconds_of(stage).values()), default=self.shape)

    def _own_rows(self, shape: StepShape) -> list[Row]:
        """What a rank sends except messages between stages, which overlap computation."""
        return [row for row in shape.sent if not self.stages or not crosses(row)]

    def _seconds_of(self, shape: StepShape) -> dict[str, float]:
        machine = self.machine
        if machine is None:
            return {}
        seconds = machine.scaled(machine.perfect_seconds(shape.work, self._own_rows(shape)))
        if self.stages or not any(map(machine.crosses, shape.sent)):
            return seconds
        return seconds | {"communicate": communicating_seconds(machine, shape.events)}

    @property
    def bubble_seconds(self) -> float:
        """Of a step, in which the busiest rank of a pipeline waits for others; 0 without a pipeline or a machine."""
        schedule = schedule_of(self.job) if self.stages else None
        if self.machine is None or schedule is None or not self.shape.work:
            return 0.0
        busy, beside = [], []
        for shape in self.stages:
            seconds = self._seconds_of(shape)
            sends = sum(
                self.machine.collective_seconds(row) for row in shape.sent if row.size > 1 and once(row, data_axes(self.job))
            )
            beside.append(seconds["update"] + sends)
            busy.append(sum(seconds.values()) - beside[-1])
        messages = [row for shape in self.stages for row in shape.sent if crosses(row)]
        return bubble_seconds(schedule, self.machine, busy, beside, messages)

    @property
    def seconds(self) -> dict[str, float] | None:
        """Of a step, by component on the busiest rank; only what crosses nodes overlaps. None without machine or loss."""
        return None if self.perfect_seconds is None else self._seconds_of(self.busiest)

    @property
    def step_seconds(self) -> float | None:
        """Of a whole step, a pipeline's bubble included."""
        return None if self.seconds is None else sum(self.seconds.values()) + self.bubble_seconds

    @property
    def samples_per_second(self) -> float | None:
        """Rows of all ranks."""
        return None if not self.step_seconds else self.job.data.rows / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON: sizes in bytes, times in seconds."""
        return {
            **as_dict(self.job),
            **self._of_rank(self.shape),
            "peak_has_activations": self.shape.complete,
            "limit": self.limit or None,
            "fits": self.fits,
            "why_not": self.why_not or None,
            "flops": self.shape.flops or None,
            "seconds": self.seconds,
            "bubble_seconds": self.bubble_seconds if self.stages and self.seconds else None,
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "stages": [self._of_rank(stage) for stage in self.stages] or None,
            "line": self.line,
        }

    def _of_rank(self, shape: StepShape) -> dict[str, Any]:
        memory = shape.memory
        return {
            "memory": {
                **{category: getattr(memory, category) for category in KINDS if category != "activations"},
                "activations": shape.activations if shape.complete else None,
                "state": memory.state,
                "peak": shape.peak,
            },
            "sent": [
                {"collective": row.collective, "group": row.group, "ranks": row.size, "calls": row.calls, "bytes": row.bytes}
                for row in shape.sent
            ],
        }


def forecast(subject: Subject, job: Job, *, machine: Machine | None, limit: int, device: str = "cpu") -> Forecast:
    """Predicts a candidate.

    Args:
        subject: its model, without values.
        job: the candidate.
        machine: for times.
        limit: bytes of a rank; 0 for the machine's own, if known.
        device: the device type, without a machine.

    Raises:
        CommandError: the strategy is unsupported, or the model's loss needs values.
    """
    target_device = machine.device if machine is not None else device
    why = why_refused(subject, job)
    if why is not None:
        raise CommandError(why)
    line, ranks = line_of(job, subject), first_ranks(job)
    try:
        subject = subject.piped_for(job)
    except JobError as error:
        raise CommandError(f"pp={size(job, 'pp')}: {subject.name} cannot be split: {error.problem}") from error
    per_node = machine.ranks_per_node if machine is not None else 1
    stages = tuple(step_shape(subject, job, rank=rank, device=target_device, ranks_per_node=per_node) for rank in ranks)
    worst = max(stages, key=lambda stage: stage.peak)
    most = limit or (machine.memory if machine is not None else 0)
    return Forecast(job, worst, machine, most, stages if len(ranks) > 1 else (), line)
