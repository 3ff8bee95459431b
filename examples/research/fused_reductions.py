"""Fused reductions: a custom pass over a step's graph, which joins neighbouring all-reduces into one call.

One gradient is one all-reduce, so a model of many small leaves waits for many latencies. Data parallelism joins gradients
into buckets (Li et al. 2020, arXiv:2006.15704). Here it is a function from a graph to a graph: ``fds.jit(step,
passes=[fused(limit)])``.

Law: no value of the graph changes by a bit, the bytes stay, and the calls fall; a pass that changes a value is found.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from shared import first, loss_fn, rows, table

import functional_ds as fds
from functional_ds import comm, compiling, testing
from functional_ds import transforms as T


def fused(limit: int) -> Callable[[fds.compiling.StepGraph], fds.compiling.StepGraph]:
    """Joins all-reduces that follow each other, up to so many bytes."""

    def fits(calls: Sequence[compiling.CollectiveCall]) -> bool:
        return calls[0].name == "all_reduce" and calls[0].site.early and sum(call.bytes for call in calls) <= limit

    return compiling.merge(fits)


def program() -> tuple[fds.Step, fds.State, Any]:
    """A step with an all-reduce for each leaf, its state and a batch."""
    step = fds.compose(T.zero(0, unit_of=fds.units.by_leaf), T.clip(1.0))(fds.train_step(loss_fn, fds.adamw(1e-2)))
    return step, step.init(first()), rows(0)


def sigmoids(graph: fds.compiling.StepGraph) -> fds.compiling.StepGraph:
    """A wrong pass: another function instead of tanh."""
    graph = compiling.copied(graph)
    next(node for node in graph.module.graph.nodes if "tanh" in str(node.target)).target = torch.ops.aten.sigmoid.default
    return compiling.finished(graph)


def run(limit: int, latencies: tuple[float, ...]) -> tuple[int, int, list[float], dict[str, torch.Tensor]]:
    """Calls and bytes of a step, its predicted times in ms, and the params after two."""
    step, state, batch = program()
    step = fds.jit(step, passes=[fused(limit)])
    state, _ = step(state, batch)
    with comm.ledger() as book:
        state, _ = step(state, batch)
    assert not step.reasons
    graph, times = step.graph(state, batch), []
    for latency in latencies:
        rates = {"flops": 1e12, "flops_fp32": 1e11, "memory_bandwidth": 1e11, "link_bandwidth": 1e9}
        machine = fds.scaling.Machine("a small machine", **rates, link_latency=latency, device="cpu")
        times.append(graph.cost(machine).seconds * 1e3)
    sums = [row for row in book.rows if row.collective == "all_reduce"]  # and not what ranks agree on
    return sum(row.calls for row in sums), sum(row.bytes for row in sums), times, step.params(state)


def law() -> None:
    """Equal bits, equal bytes, fewer calls; a wrong pass is found."""
    testing.check_pass(fused(10**6), program, same_ledger=False)
    apart, joined = (comm.simulate(run, limit, (), world_size=2)[0] for limit in (1, 10**6))
    assert joined[0] < apart[0]
    assert joined[1] == apart[1]
    assert all(torch.equal(joined[3][path], leaf) for path, leaf in apart[3].items())
    found = ""
    try:
        testing.check_pass(sigmoids, program)
    except AssertionError as error:
        found = str(error)
    assert "the pass sigmoids changes a value" in found


def main(limits: tuple[int, ...] = (1, 30_000, 10**6), latencies: tuple[float, ...] = (0.0, 1e-4, 1e-3), ranks: int = 2) -> str:
    """Calls, bytes and predicted times by the size of a bucket."""
    lines = []
    for limit in limits:
        calls, sent, times, _ = comm.simulate(run, limit, latencies, world_size=ranks)[0]
        lines.append((f"{limit:,}", calls, f"{sent:,}", *times))
    return table(["bytes in a call at most", "calls", "bytes", *(f"ms, latency {1e6 * x:g} μs" for x in latencies)], lines)


TINY = {"limits": (1, 10**6), "latencies": (0.0,)}

if __name__ == "__main__":
    law()
    print(main())
