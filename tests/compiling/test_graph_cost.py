"""The price of a graph: its counts are those of a run, and its time obeys the laws of one device beside its channels."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.comm.algorithms.cost import Link
from functional_ds.comm.record.ledger import Row
from functional_ds.compiling import GraphCost, StepGraph, regather, schedule
from functional_ds.compiling.graphs.graph_cost import COMPUTE
from functional_ds.dry_run.operations import OperationCounter
from functional_ds.scaling import Machine

WIDTH = 8
CPU = Machine("a CPU", 2e9, 1e9, 1e9, link_bandwidth=1e8, link_latency=1e-6, operation_latency=1e-6, device="cpu")
CUDA = attrs.evolve(CPU, name="a GPU", device="cuda", operation_latency=2e-6)
MACHINES = [CPU, CUDA]


def squared(apply: Any) -> Callable[..., Any]:
    return lambda params, batch: apply(params, batch).square().mean()


def hpz() -> Any:
    mesh = comm.mesh(node=2, gpu=2)
    return T.zero(3, mesh["node", "gpu"], intra_node=mesh["gpu"], hpz=True)


def hsdp() -> Any:
    mesh = comm.mesh(node=2, gpu=2)
    return T.zero(3, mesh["gpu"], replicate=mesh["node"])


@attrs.frozen
class Run:
    """Rank 0's graph, and the ledger and operations of an eager step."""

    graph: StepGraph
    rows: Sequence[Row]
    flops: int


STRATEGIES: dict[str, Callable[[], Sequence[Any]]] = {
    "stage 0": lambda: [T.zero(0), T.clip(1.0)],
    "stage 1": lambda: [T.zero(1), T.accumulate(2)],
    "stage 3": lambda: [T.zero(3), T.clip(1.0)],
    "stage 3 in bf16": lambda: [T.mixed_precision("bf16"), T.zero(3), T.accumulate(2)],
    "hpZ": lambda: [hpz()],
    "HSDP": lambda: [hsdp()],
}


@cache
def run(name: str, passes: Any = None, blocks: int = 4) -> Run:
    def program() -> Run:
        torch.manual_seed(0)
        apply, params = fds.functional(
            nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)))
        )
        step = fds.compose(*STRATEGIES[name]())(fds.train_step(squared(apply), fds.adamw(0.1)))
        jitted, x = fds.jit(step, passes=passes), torch.ones(4, WIDTH)
        state, _ = jitted(jitted.init(params), x)
        graph = jitted.graph(state, x)
        with comm.ledger() as book, OperationCounter() as counter:
            step(state, x)
        return Run(graph, [row for row in book.rows if not row.group.endswith("/control")], counter.flops)

    return comm.simulate(program, world_size=4 if name in ("hpZ", "HSDP") else 2)[0]


@pytest.mark.sample(2)
@pytest.mark.law(21)
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_counted_is_what_a_run_sends_and_computes(name: str) -> None:
    found = run(name)
    cost = found.graph.cost(CPU)
    assert sorted(cost.sent, key=repr) == sorted(found.rows, key=repr)
    assert cost.flops == found.flops > 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("machine", MACHINES, ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_times_add_up(name: str, machine: Machine) -> None:
    cost = run(name).graph.cost(machine)
    assert cost.seconds == pytest.approx(cost.compute + cost.host + sum(cost.exposed.values()))
    assert cost.seconds == max(span.end for span in cost.spans)
    assert cost.host > 0
    assert sum(cost.phases.values()) <= cost.seconds * (1 + 1e-9)
    assert {"forward", "backward", "update"} <= cost.phases.keys()
    by_lane: dict[str, float] = {}
    for span in cost.spans:
        assert span.begin >= by_lane.get(span.lane, 0.0)
        by_lane[span.lane] = span.end


@pytest.mark.parametrize("machine", MACHINES, ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_critical_path_takes_the_whole_step(name: str, machine: Machine) -> None:
    cost = run(name).graph.cost(machine)
    path = cost.critical_path
    assert all(a.end == b.begin for a, b in pairwise(path))
    assert path[-1].end == cost.seconds
    assert path[0].begin == 0 or machine is CUDA  # whose host starts an operation first


def test_its_chart_has_each_span_once_and_the_memory() -> None:
    cost = run("stage 3").graph.cost(CPU)
    chart = cost.chart()
    spans = [(lane, span.name, span.began, span.ended) for lane, row in chart.lanes.items() for span in row]
    assert sorted(spans) == sorted((span.lane, span.does, span.begin, span.end) for span in cost.spans)
    assert [arrow.from_time for arrow in chart.arrows] == [arrow.to_time for arrow in chart.arrows]  # a path without gaps
    assert max(value for _, value in chart.curve) == max(held.bytes for _, held in cost.memory)
    assert cost._repr_html_().count("<rect") == len(cost.spans)


@pytest.mark.parametrize("name", STRATEGIES)
def test_infinitely_fast_links(name: str) -> None:
    cost = run(name).graph.cost(attrs.evolve(CPU, link_bandwidth=1e30, link_latency=0.0))
    assert cost.seconds == pytest.approx(cost.compute + cost.host)
    assert cost.compute == run(name).graph.cost(CPU).compute


FAST = attrs.evolve(CPU, flops=1e30, flops_fp32=1e30, memory_bandwidth=1e30, operation_latency=0.0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_infinitely_fast_device(name: str) -> None:
    cost = run(name).graph.cost(FAST)
    busy = cost.channels.values()
    assert max(busy) <= cost.seconds * (1 + 1e-9)
    assert cost.seconds <= sum(busy) * (1 + 1e-9)
    expected = sum(CPU.collective_seconds(row) for row in run(name).rows)
    assert sum(busy) == pytest.approx(expected)


def test_one_channel_is_always_busy_beside_an_infinitely_fast_device() -> None:
    def program() -> GraphCost:
        step = fds.jit(fds.train_step(lambda w, x: comm.all_reduce(comm.all_reduce(x @ w).tanh()).sum(), fds.sgd(0.1)))
        state, x = step.init(torch.ones(4, 4)), torch.ones(2, 4)
        state, _ = step(state, x)
        return step.graph(state, x).cost(FAST)

    (found, _) = comm.simulate(program, world_size=2)
    assert len(found.channels) == 1
    assert found.seconds == pytest.approx(sum(found.channels.values()))
    assert found.seconds == pytest.approx(4 * FAST.collective_seconds(attrs.evolve(found.sent[0], calls=1, bytes=32)))


@cache
def scheduled() -> list[StepGraph]:
    plain = run("stage 3", (regather(live=2),), 6).graph
    return [schedule(ahead=ahead)(plain) for ahead in range(5)]


@settings(max_examples=8)
@given(st.sampled_from(MACHINES), st.floats(1e6, 1e12), st.floats(1e6, 1e12), st.floats(0, 1e-3))
def test_starting_gathers_earlier_is_never_slower(machine: Machine, rate: float, bandwidth: float, latency: float) -> None:
    machine = attrs.evolve(machine, flops=rate, flops_fp32=rate, link_bandwidth=bandwidth, link_latency=latency)
    times = [graph.cost(machine).seconds for graph in scheduled()]
    assert all(later <= sooner * (1 + 1e-9) for sooner, later in pairwise(times)), times


def test_an_early_gather_hides_behind_a_product() -> None:
    """Where both take long, the step with a prefetch is shorter by what the products hide."""
    machine = attrs.evolve(CPU, flops_fp32=1e8, operation_latency=0.0)
    late, early = (graph.cost(machine) for graph in scheduled()[:2])
    assert late.compute == pytest.approx(early.compute)
    assert early.seconds < 0.98 * late.seconds
    assert sum(early.exposed.values()) < sum(late.exposed.values())


def test_names_change_no_price() -> None:
    graph = run("stage 3").graph
    before = graph.cost(CPU)
    renamed = schedule(ahead=1)(graph)  # a copy
    for number, node in enumerate(renamed.module.graph.nodes):
        node._rename(f"other_{number}")
    after = renamed.cost(CPU)
    assert (after.seconds, after.compute, after.host) == (before.seconds, before.compute, before.host)
    assert [(span.begin, span.end) for span in after.spans] == [(span.begin, span.end) for span in before.spans]


def test_links_of_groups() -> None:
    graph = run("HSDP").graph
    plain, slow = graph.cost(CPU), graph.cost(CPU, links={"node": Link(latency=1.0, bandwidth=1e8)})
    names = {span.lane.partition("/")[0] for span in plain.spans} - {COMPUTE}
    assert names == {"gpu", "node"}
    for name, seconds in slow.channels.items():
        assert seconds == pytest.approx(plain.channels[name]) if name.startswith("gpu") else seconds > 1.0


@pytest.mark.parametrize(("name", "per_node"), [("stage 3", 1), ("HSDP", 2)])
def test_channels_share_the_link_between_nodes(name: str, per_node: int) -> None:
    """So a step takes at least the time of all that crosses it; a faster one is never slower; inside a node nothing changes."""
    graph, times = run(name).graph, list[float]()
    for bandwidth in (1e4, 1e5, 1e6):
        machine = attrs.evolve(CPU, ranks_per_node=per_node, node_bandwidth=bandwidth)
        cost = graph.cost(machine)
        times.append(cost.seconds)
        assert cost.seconds >= sum(machine.collective_seconds(row) for row in cost.sent if machine.crosses(row)) * (1 - 1e-9)
        assert cost.seconds == pytest.approx(cost.compute + cost.host + sum(cost.exposed.values()))
    assert times == sorted(times, reverse=True)
    assert graph.cost(attrs.evolve(machine, ranks_per_node=4)).seconds == graph.cost(CPU).seconds


def test_a_price_is_printed() -> None:
    cost = run("stage 3").graph.cost(CPU)
    shown = str(cost).splitlines()
    assert shown[0].startswith("step ")
    assert any(line.startswith("  waits for all_gather of '0'") for line in shown)
    assert any(line.startswith("channel world/reduce") for line in shown)
    assert repr(cost).startswith("GraphCost(")


def test_a_collectives_results_have_memory_from_its_start_on() -> None:
    graph = run("stage 3", (regather(live=1), schedule(ahead=1))).graph
    held, gather = graph.live(), graph.gathers()[1]
    nodes = list(graph.module.graph.nodes)
    before = held[nodes[nodes.index(gather.start) - 1]].bytes
    whole = sum(x.nbytes for x in gather.wait.meta["val"] if isinstance(x, Tensor))
    assert held[gather.start].bytes >= before + whole > before
