"""Hosts that a slow link joins: which bytes cross it, what a step computes meanwhile, and predictions of measured steps."""

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from functional_ds import comm
from functional_ds.cli.planning.forecast import Forecast, communicating_seconds, forecast
from functional_ds.cli.planning.subject import planned
from functional_ds.comm.record.ledger import Row
from functional_ds.dry_run.events import Events
from functional_ds.dry_run.operations import SizedOperation
from functional_ds.scaling import Machine
from tests.cli.candidates import on_mesh
from tests.cli.models_by_name import HERE
from tests.cli.test_axes import held_and_sent

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ONE = Machine("one host", 1e9, 1e9, 1e9, 1e8, link_latency=1e-6, operation_latency=1e-6, device="cpu", overlaps=0.25)
HOSTS = attrs.evolve(ONE, ranks_per_node=2, node_bandwidth=1e6)
GPUS = attrs.evolve(HOSTS, device="cuda", overlaps=1.0)

operations = st.builds(SizedOperation, st.sampled_from(["products", "elementwise", "update"]), bytes=st.integers(0, 10**7))
rows = st.builds(
    partial(Row, "all_gather", "a group", calls=1),
    st.just(4),
    bytes=st.integers(0, 10**6),
    ranks=st.sampled_from([(0, 1, 2, 3), (0, 2, 4, 6), (0, 4, 1, 5)]),
)
steps = st.lists(st.one_of(operations, rows), max_size=20).map(Events)


def seconds_of_operations(machine: Machine, events: Events) -> float:
    return sum(machine.scaled(machine.perfect_seconds(events.work, ())).values())


@pytest.mark.parametrize("machine", [HOSTS, GPUS], ids=["cpu", "cuda"])
@given(events=steps)
@example(events=Events([Row("all_gather", "a group", 4, calls=1, bytes=10**6, ranks=(0, 1, 2, 3))] * 2))
def test_bounds_of_what_communication_takes(machine: Machine, events: Events) -> None:
    """At most everything one after another; at least what ranks cannot compute beside, and what the link is busy for."""
    found, sent = communicating_seconds(machine, events), [event for event in events if isinstance(event, Row)]
    crossing = sum(machine.collective_seconds(row) for row in sent if machine.crosses(row))
    assert found <= sum(map(machine.collective_seconds, sent)) * (1 + 1e-9)
    assert found >= sum(map(machine.held_seconds, sent)) * (1 - 1e-9)
    computing = sum(machine.operation_seconds(event) for event in events if isinstance(event, SizedOperation))
    starts = len(events) * machine.start_seconds
    assert computing + starts + found >= crossing * (1 - 1e-9)


@given(events=steps, times=st.floats(1.0, 1e3), field=st.sampled_from(["node_bandwidth", "link_bandwidth", "overlaps"]))
def test_a_faster_link_is_never_slower(events: Events, times: float, field: str) -> None:
    faster = attrs.evolve(HOSTS, **{field: 1.0 if field == "overlaps" else times * getattr(HOSTS, field)})
    assert communicating_seconds(faster, events) <= communicating_seconds(HOSTS, events) * (1 + 1e-9)


@given(events=steps)
def test_on_one_host_communication_overlaps_nothing(events: Events) -> None:
    alone = [ONE, attrs.evolve(HOSTS, ranks_per_node=8)]
    expected = sum(ONE.collective_seconds(event) for event in events if isinstance(event, Row))
    assert [communicating_seconds(machine, events) for machine in alone] == pytest.approx([expected] * 2)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_more_hosts_never_send_fewer_bytes_to_each_other(name: str) -> None:
    """And hierarchical collectives never more than those of a group whose neighbours share no host, in no more time."""

    def program(order: list[int]) -> Row:
        with comm.ledger() as book:
            getattr(comm, name)(torch.ones(64), comm.new_group(order, "order"))
        return book.rows[0]

    def sent(per_node: int, order: list[int]) -> float:
        return sum(row.leaving(per_node) for row in comm.simulate(program, order, world_size=8, ranks_per_node=per_node))

    found = [sent(per_node, [*range(8)]) for per_node in (8, 4, 2, 1)]
    assert found == sorted(found)
    assert found[0] == 0 < found[1]
    apart = [0, 4, 1, 5, 2, 6, 3, 7]
    assert sent(4, [*range(8)]) <= sent(4, apart)
    hosts = attrs.evolve(HOSTS, ranks_per_node=4)
    near, far = (comm.simulate(program, order, world_size=8, ranks_per_node=4)[0] for order in ([*range(8)], apart))
    assert hosts.sends(near) <= hosts.sends(far)


def test_a_plan_for_hosts_has_hierarchical_collectives() -> None:
    """Its rows, also their bytes that leave a host, are those of a run; one host is as without links between hosts."""
    job = on_mesh(f"{HERE}:mlp", 4, stage=3, precision="fp32")
    made = {machine: forecast(planned(job), job, machine=machine, limit=0) for machine in (HOSTS, ONE)}
    run = comm.simulate(held_and_sent, job, world_size=4, ranks_per_node=2)[0][1]
    assert {(row.collective, row.group): (row.calls, row.bytes) for row in made[HOSTS].shape.sent} == run
    leaving = {row.group: row.leaving(2) / row.bytes for row in made[HOSTS].shape.sent if row.collective != "permute"}
    assert leaving["world/reduce"] == pytest.approx(1 / 3)
    together = forecast(planned(job), job, machine=attrs.evolve(HOSTS, ranks_per_node=4), limit=0)
    assert together.seconds == made[ONE].seconds == ONE.scaled(made[ONE].perfect_seconds or {})
    assert seconds(made[HOSTS]) >= seconds(made[ONE])
    assert seconds(made[HOSTS]) <= sum(HOSTS.scaled(made[HOSTS].perfect_seconds or {}).values()) * (1 + 1e-9)


def seconds(found: Forecast) -> float:
    assert found.step_seconds is not None
    return found.step_seconds


@pytest.fixture(scope="module")
def hosts() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("hosts_predicted")


CASES = [(1, "zero0"), (1, "zero3 int8"), (2, "zero0"), (2, "replicated"), (2, "two-level hpZ int8")]


def is_in_the_file(per_host: int, name: str, key: str, predict: Any, hosts: Any) -> None:
    found = json.loads((BENCHMARKS / "results/hosts.json").read_text(encoding="utf-8"))
    mine = [row for row in found["rows"] if (row["ranks_per_host"], row["contender"]) == (per_host, name)]
    expected = {row["rate"]: row[key] for row in mine if key in row}
    assert hosts.predicted(found, per_host, name, predict) == pytest.approx(expected, rel=1e-3)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("per_host", "name"), CASES)
def test_plans_of_measured_hosts_are_the_files(per_host: int, name: str, hosts: Any) -> None:
    is_in_the_file(per_host, name, "plan_ms", hosts.planned, hosts)


@pytest.mark.sample(0)
@pytest.mark.parametrize(("per_host", "name"), CASES)
def test_costs_of_graphs_on_measured_hosts_are_the_files(per_host: int, name: str, hosts: Any) -> None:
    is_in_the_file(per_host, name, "graph_ms", hosts.jitted, hosts)
