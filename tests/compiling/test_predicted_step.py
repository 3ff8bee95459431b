"""A jitted step's predicted time: its parts, what it obeys on synthetic machines, and the measured time beside it."""

from functools import cache
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
from functional_ds.base import tree
from functional_ds.comm.algorithms.cost import Link
from functional_ds.compiling import JitStep, JitWarning, PredictedStep, StepGraph, UntraceableError
from functional_ds.scaling import Machine
from functional_ds.step.state.state import State

CPU = Machine("m", 2e9, 1e9, 1e9, link_bandwidth=1e8, link_latency=1e-6, operation_latency=1e-6, device="cpu")


def made(stage: int = 3) -> tuple[JitStep, State, Tensor]:
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))))
    step = fds.train_step(lambda params, x: apply(params, x).square().mean(), fds.adamw(0.1))
    jitted, x = fds.jit(T.zero(stage)(step)), torch.ones(4, 8)
    state, _ = jitted(jitted.init(params), x)
    return jitted, state, x


def alone(machine: Machine, **others: Any) -> PredictedStep:
    step, state, x = made(0)
    return step.predicted(state, x, machine, **others)


def test_on_several_ranks_it_is_the_graphs_cost_and_the_agreement() -> None:
    def program() -> None:
        step, state, x = made()
        links = {"world": Link(latency=1e-3, bandwidth=1e6)}
        with comm.ledger() as book:
            found = step.predicted(state, x, CPU, links=links)
            cost = step.graph(state, x).cost(CPU, links=links)
        assert not book.rows
        assert found.cost.seconds == cost.seconds
        assert found.agreement == pytest.approx(CPU.link_latency + 8 / CPU.link_bandwidth)
        assert found.seconds == pytest.approx(found.compute + found.host + found.communication)
        assert found.communication > found.agreement
        assert (found.measured, found.ratio) == (None, None)
        with pytest.raises(ValueError, match="take turns"):
            step.predicted(state, x, CPU, steps=1)

    comm.simulate(program, world_size=2)


def test_what_nodes_take_adds_up() -> None:
    """The host's time is the number of nodes times their latency, which is not an eager operation's."""
    free = alone(attrs.evolve(CPU, node_latency=0.0))
    assert free.host == 0
    first, second = (alone(attrs.evolve(CPU, node_latency=each)) for each in (1e-3, 2e-3))
    assert first.host > 0
    assert second.host == pytest.approx(2 * first.host)
    assert first.seconds - first.host == pytest.approx(free.seconds)
    assert alone(attrs.evolve(CPU, node_latency=CPU.operation_latency)).seconds == alone(CPU).seconds


FIELDS = ("flops_fp32", "memory_bandwidth", "link_bandwidth", "overlaps", "link_latency", "operation_latency", "node_latency")


@cache
def graph_of_stage_3() -> StepGraph:
    def program() -> StepGraph:
        step, state, x = made()
        return step.graph(state, x)

    return comm.simulate(program, world_size=2)[0]


@settings(max_examples=25)
@given(st.sampled_from(FIELDS), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["cpu", "cuda"]), st.floats(0, 1))
def test_a_better_machine_is_never_slower(field: str, one: float, other: float, device: str, overlaps: float) -> None:
    low, high = sorted((one, other))
    if "latency" in field:
        low, high = high * 1e-4, low * 1e-4
    elif field != "overlaps":
        low, high = 1e6 + 1e9 * low, 1e6 + 1e9 * high
    machine = attrs.evolve(CPU, device=device, overlaps=overlaps)
    worse, better = (graph_of_stage_3().cost(attrs.evolve(machine, **{field: each})) for each in (low, high))
    assert better.seconds <= worse.seconds * (1 + 1e-9)
    for cost in (worse, better):
        assert cost.seconds == pytest.approx(cost.compute + cost.host + sum(cost.exposed.values()))
        assert cost.critical_path[-1].end == cost.seconds


def test_where_nothing_overlaps_all_communication_is_exposed() -> None:
    graph = graph_of_stage_3()
    whole, none = graph.cost(CPU), graph.cost(attrs.evolve(CPU, overlaps=0.0))
    assert sum(none.exposed.values()) == pytest.approx(sum(none.channels.values()))
    assert none.channels == pytest.approx(whole.channels)
    assert sum(whole.exposed.values()) < sum(none.exposed.values())


def test_measured_steps_leave_the_state_as_it_is() -> None:
    step, state, x = made(0)
    before = [leaf.clone() for leaf in tree.leaves(state.params)]
    found = step.predicted(state, x, CPU, steps=2)
    assert found.measured is not None
    assert found.measured > 0
    assert found.ratio == found.seconds / found.measured
    assert "predicted / measured" in str(found)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves(state.params), strict=True))
    step(state, x)


def on_a_process() -> tuple[float, float | None]:
    step, state, x = made()
    found = step.predicted(state, x, CPU, steps=2)
    return found.agreement, found.measured


def test_processes_measure() -> None:
    for agreement, measured in comm.spawn(on_a_process, world_size=2):
        assert agreement > 0
        assert measured is not None
        assert measured > 0


def test_what_cannot_be_predicted() -> None:
    step, state, x = made(0)
    with pytest.raises(ValueError, match="steps=-1"):
        step.predicted(state, x, CPU, steps=-1)
    eager = fds.jit(fds.train_step(lambda params, x: params["w"].sum() * (x.sum().item() > 0), fds.sgd(0.1)))
    state, _ = eager(eager.init({"w": torch.ones(2)}), x)
    with pytest.raises(UntraceableError):
        eager.predicted(state, x, CPU)
    with pytest.warns(JitWarning):
        eager(state, x)


@pytest.mark.parametrize(
    ("field", "value"), [("node_latency", -1.0), ("node_latency", "no"), ("overlaps", 1.5), ("overlaps", True)]
)
def test_wrong_machines(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}={value!r} must be a number"):
        attrs.evolve(CPU, **{field: value})
