"""The cost of operations: kinds, bytes, floating-point operations; and rates that are measured here."""

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from functional_ds.cli.planning.known_machines import measured_here
from functional_ds.cli.planning.subject import planned
from functional_ds.cli.planning.values_free_step import step_shape
from functional_ds.dry_run.operations import WORK_KINDS, OperationCounter, SizedOperation
from functional_ds.jobs.job_subject import subject_of
from functional_ds.scaling.machine import FACTORS, Machine
from tests.cli.candidates import on_mesh
from tests.cli.models_by_name import HERE

X, ROW, HALF = torch.ones(8, 4), torch.ones(4), torch.ones(8, 4, dtype=torch.bfloat16)
Q = torch.ones(2, 4, 16, 8)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: X + X, SizedOperation("elementwise", bytes=3 * 128)),
        (lambda: X + ROW.expand(8, 4), SizedOperation("elementwise", bytes=2 * 128 + 16)),
        (lambda: torch.zeros_like(X).mul_(X), SizedOperation("elementwise", bytes=3 * 128)),
        (lambda: X.softmax(-1), SizedOperation("elementwise", bytes=2 * 128)),
        (X.sum, SizedOperation("elementwise", bytes=128 + 4)),
        (lambda: HALF * 2, SizedOperation("elementwise", half=True, bytes=2 * 64)),
        (X.clone, SizedOperation("copies", bytes=2 * 128)),
        (lambda: torch.empty(8, 4).copy_(X), SizedOperation("copies", bytes=2 * 128)),
        (X.bfloat16, SizedOperation("copies", bytes=128 + 64)),
        (lambda: torch.cat([X, X]), SizedOperation("copies", bytes=4 * 128)),
        (lambda: F.embedding(torch.zeros(2, dtype=torch.int64), X), SizedOperation("copies", bytes=2 * 32)),
        (lambda: torch.zeros(8, 4), SizedOperation("copies", bytes=128)),
        (lambda: X.view(4, 8), SizedOperation("copies")),
        (lambda: torch.empty(9), SizedOperation("copies")),
        (lambda: X @ X.t(), SizedOperation("products", flops=2 * 8 * 4 * 8, bytes=2 * 128 + 256)),
        (lambda: HALF @ HALF.t(), SizedOperation("products", half=True, flops=2 * 8 * 4 * 8, bytes=2 * 64 + 128)),
    ],
)
def test_an_operation_is_its_kind_and_sizes(run: Callable[[], Any], expected: SizedOperation) -> None:
    with OperationCounter() as counter:
        run()
    assert [*counter.operations][-1] == expected


def test_attention_and_updates_are_kinds() -> None:
    weight = torch.ones(8, requires_grad=True)
    weight.grad = torch.ones(8)
    optimizer = torch.optim.AdamW([weight], fused=True)
    with OperationCounter() as counter:
        F.scaled_dot_product_attention(Q, Q, Q)
        optimizer.step()
    found = {each.kind: each for each in counter.operations}
    assert found["attention"].flops == 2 * 2 * (2 * 4) * 16 * 16 * 8
    assert (
        7 * 32 <= found["update"].bytes <= 8 * 32 + 2 * 4
    )  # params, two moments: read and written; gradients; the step's count


def test_the_step_without_values_has_a_runs_operations() -> None:
    """Of the same kinds and sizes; views may differ, and what is copied on a rank of processes."""
    candidate = on_mesh(f"{HERE}:attention", stage=1, precision="fp32", micro_batch=2)
    shape, real = step_shape(planned(candidate), candidate), subject_of(candidate, device="cpu")
    assert real.batch is not None
    step, batch = real.step(candidate), real.batch(2)
    state = step.init(real.params)
    for _ in range(2):
        state, _ = step(state, batch)
    with OperationCounter() as counter:
        step(state, batch)

    def computing(work: Any) -> dict[SizedOperation, int]:
        return {each: count for each, count in work.items() if each.kind != "copies"}

    assert computing(shape.work) == computing(counter.operations)
    assert sum(each.flops * count for each, count in shape.work.items()) == shape.flops
    assert {each.kind for each in shape.work} == set(WORK_KINDS) - {"pages"}


def test_recomputed_operations_are_known() -> None:
    """Those of the forward pass, once more. The host takes longer to start them."""
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Tanh())
    with OperationCounter() as forward:
        found = checkpoint(block, X, use_reentrant=False)
    with OperationCounter() as backward:
        found.sum().backward()
    again = {attrs.evolve(each, again=False): count for each, count in backward.operations.items() if each.again}
    assert again.items() <= forward.operations.items()
    assert {"products", "elementwise"} <= {each.kind for each in again}
    assert not any(each.again for each in forward.operations)
    machine = Machine("m", 1e12, 1e12, 1e12, 1e9, operation_latency=1e-3)
    once, twice = (machine.perfect_seconds({SizedOperation("copies", again=each): 2}, ())["starts"] for each in (False, True))
    assert once == 2e-3 < twice


def test_large_results_need_new_pages() -> None:
    """In a bf16 copy of 40 MB; views of it, and what is written into memory that is there, need none."""
    with OperationCounter() as counter:
        x = torch.empty(20 << 20, dtype=torch.bfloat16, device="meta")
        x.view(4, -1).add_(1)
        x[: 1 << 20] + 1
    assert [each.pages for each in counter.operations] == [40 << 20, 0, 0, 0]
    machine = Machine("m", 1.0, 1.0, 1e12, 1.0, page_bandwidth=1e9)
    assert machine.perfect_seconds(counter.operations, ())["pages"] == (40 << 20) / 1e9
    assert attrs.evolve(machine, page_bandwidth=0.0).perfect_seconds(counter.operations, ())["pages"] == 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 1])
def test_rates_are_measured_by_all_ranks_at_once(ranks: int) -> None:
    found = measured_here(ranks, seconds=0.0)
    assert found.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert ("2 ranks at once" in found.name) == (ranks == 2)
    assert found.factors.keys() == set(FACTORS)
    assert min(found.flops, found.flops_fp32, found.memory_bandwidth, found.link_bandwidth, found.operation_latency) > 0
    assert found.factors["products"] == found.factors["starts"] == 1.0
    assert attrs.evolve(found) == Machine(**json.loads(json.dumps(attrs.asdict(found))))  # as a file
