"""Law 67: what a run and a dry run allocate, compute and send are the same events, and these add up to what others count."""

from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.base.marks import without_values
from functional_ds.comm.worlds.shapes import rank_on_shapes
from functional_ds.dry_run.dry_run import dry_run
from functional_ds.dry_run.events import AllocationEvent, EventRecorder, Events, recorded
from functional_ds.dry_run.operations import OperationCounter
from tests.planting import Bug, planted

WIDTH = 64
STRATEGIES: dict[str, Any] = {
    "stage 0": lambda: [T.zero(0), T.clip(1.0)],
    "stage 2 in bf16": lambda: [T.mixed_precision("bf16"), T.zero(2), T.accumulate(2)],
    "stage 3": lambda: [T.zero(3)],
}


def made(name: str) -> tuple[fds.Step, Any, Tensor]:
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))))
    step = fds.compose(*STRATEGIES[name]())(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(0.1)))
    return step, params, torch.ones(8, WIDTH)


@pytest.mark.law(67)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_dry_run_has_the_events_of_a_run(name: str) -> None:
    """The ledger's rows, operations but for copies, and what is gathered at most; ``test_peaks.py`` has peaks."""

    def program() -> tuple[Any, ...]:
        step, params, batch = made(name)
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, batch)
        with comm.ledger() as book, OperationCounter() as counter, recorded(state, batch) as run:
            step(state, batch)
        computed = {each: count for each, count in counter.operations.items() if each.kind != "copies"}
        assert run.events.sent == book.rows
        assert (run.events.work, run.events.flops) == (counter.operations, counter.flops)
        return book.rows, computed, counter.flops, run.events.peak("all_gather")

    def dry() -> Events:
        step, params, batch = made(name)
        return dry_run(step, step.init(without_values(params)), batch.to("meta"))

    for rank, (rows, computed, flops, gathered) in enumerate(comm.simulate(program, world_size=2)):
        events = rank_on_shapes(dry, world_size=2, rank=rank)
        assert events.sent == rows
        assert {each: count for each, count in events.work.items() if each.kind != "copies"} == computed
        assert events.flops == flops > 0
        if name == "stage 3":  # others gather into the memory of the params before
            assert events.peak("all_gather") == gathered > 0


@pytest.mark.law(67)
def test_what_is_repeated_is_computed_as_often() -> None:
    """A loop that runs once on shapes counts as all its rounds: what it sends, and what it computes."""

    def program(device: str) -> tuple[Any, int]:
        x, w = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
        held = [x]

        def body(i: int) -> None:
            held.append(comm.permute(held.pop() @ w, [(rank, (rank + 1) % 4) for rank in range(4)]))

        with recorded() as run:
            comm.repeat(3, body)
        return run.events.sent, run.events.flops

    sent, flops = comm.simulate(program, "cpu", world_size=4)[0]
    assert rank_on_shapes(program, "meta", world_size=4, rank=0) == (sent, flops)
    assert flops == 3 * 2 * 4 * 4 * 4


def test_memory_that_is_gone_is_given_back() -> None:
    """A storage counts once, whatever views there are of it, until it is freed; a label is a storage's from then on."""
    run = EventRecorder()
    first = torch.ones(10)
    run.note([first, first[2:]])
    assert list(run.allocated().values()) == [40]
    del first
    assert run.allocated() == {}
    second = torch.ones(20)
    run.note(second)
    run.note(second, "all_gather")
    third = torch.ones(1)
    run.note(third)
    assert (run.events.peak(), run.events.peak("all_gather")) == (84, 80)
    assert [event.bytes for event in run.events if isinstance(event, AllocationEvent)] == [40, -40, 80, -80, 80, 4]
    second.untyped_storage().resize_(0)
    run.resized()
    assert sum(run.allocated().values()) == 4
    assert run.events.peak(since=len(run.events) - 1) == 4


def check_curve() -> None:
    with recorded() as run:
        ones = torch.ones(10)
        first = ones * 2
        middle = perf_counter()
        del ones, first
        last = torch.ones(4)
    times, sizes = zip(*run.events.curve(), strict=True)
    assert sizes == (40, 80, 40, 0, last.nbytes)
    assert sorted(times) == list(times)
    assert times[1] < middle < times[2]


def test_the_curve_is_what_is_allocated_over_time() -> None:
    check_curve()


def test_a_bug_is_seen() -> None:
    bug = Bug("freed when it was made", "dry_run.events:EventRecorder._freed", "made.grown(-made.bytes)",
              "attrs.evolve(made, bytes=-made.bytes)")  # fmt: skip
    with planted(bug), pytest.raises(bug.shows):
        check_curve()


def test_what_is_apart_does_not_count() -> None:
    """Nor its views, and what is changed in place."""
    held = torch.ones(10)
    with recorded(apart=held) as run:
        held[1:].add_(1)
        made = held * 2
    assert run.events.peak() == made.nbytes


def test_sparse_tensors_have_no_storage() -> None:
    with EventRecorder() as run:
        found = torch.eye(3).to_sparse()
    assert found.is_sparse
    assert run.events.peak() > 0
