"""``bubble_seconds``: what a pipeline's ranks wait for each other, from what each of them computes."""

from collections.abc import Sequence

from functional_ds.comm.algorithms.cost import Link
from functional_ds.comm.record.ledger import Row
from functional_ds.pipelining.planning.costs import Costs
from functional_ds.pipelining.planning.timeline import timeline
from functional_ds.pipelining.schedules.schedule import Schedule
from functional_ds.scaling.machine import Machine

__all__ = ["bubble_seconds", "crosses", "once"]

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
    """Seconds that the busiest rank does not compute in a step.

    The schedule is timed by ``pipelining.timeline``. A rank's stages share what it computes equally, and so do a stage's
    micro-batches.

    Law: where ranks are equally busy and messages take no time, one rank's ``busy`` times (p - 1) / m under 1F1B on p ranks.

    Args:
        schedule: of the pipeline.
        machine: for the links.
        busy: by rank, the seconds of what it computes and sends for its micro-batches.
        beside: by rank, the seconds of what it does once a step.
        messages: rows of the ledgers of what crosses stages.

    >>> from functional_ds.pipelining import one_f_one_b
    >>> here = Machine("m", flops=1e12, flops_fp32=1e12, memory_bandwidth=1e12, link_bandwidth=1e9)
    >>> round(bubble_seconds(one_f_one_b(2, 4), here, [8.0, 8.0], [0.0, 0.0], []), 3)
    2.0
    """
    of_rank = [sum(place == rank for place in schedule.placement) for rank in range(schedule.ranks)]
    each = [busy[rank] / (of_rank[rank] * schedule.microbatches * _THIRDS) for rank in schedule.placement]
    calls = sum(row.calls for row in messages)
    factor = machine.factors["communicate"]
    near = all(len({rank // machine.ranks_per_node for rank in row.ranks}) < 2 for row in messages)
    wire = machine.network.inside if near else machine.network.across
    link = Link(latency=factor * wire.latency, bandwidth=wire.bandwidth / max(factor, 1e-9))
    mean = sum(row.bytes for row in messages) / calls if calls else 0.0
    found = timeline(schedule, Costs(forward=each, inputs=each, weights=each, link=link, message=mean))
    whole = found.makespan + max(beside)
    return max(0.0, whole - max(own + extra for own, extra in zip(busy, beside, strict=True)))
