"""The most bytes of tensors that a rank has at one time in a step: predicted, and measured on processes."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds.cli.planning.candidate import first_ranks, name_of
from functional_ds.cli.planning.subject import planned
from functional_ds.cli.planning.values_free_step import step_shape
from functional_ds.comm.backends import gloo
from functional_ds.comm.worlds.gloo_shapes import GlooShapesWorld
from functional_ds.comm.worlds.shapes import rank_on_shapes
from functional_ds.dry_run.events import EventRecorder, recorded
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_subject import subject_of
from functional_ds.jobs.strategy import rows_of_rank
from tests.cli.candidates import on_mesh
from tests.cli.models_by_name import HERE


def case(model: str, dp: int, stage: int, precision: str, accumulate: int = 1, **more: Any) -> Job:
    rows = 2 if model == "attending" else 64
    return on_mesh(f"{HERE}:{model}", dp, stage=stage, precision=precision, micro_batch=rows, accumulate=accumulate, **more)


# Sums of halves are folded in fp32 on another thread, whenever the other rank's message has come.
CASES = [
    (case("attending", 2, 0, "fp32", 2, recompute=True), 0.1),
    (case("blocks", 2, 3, "fp32"), 0.02),
    (case("blocks", 2, 3, "bf16", 2, recompute=True), 0.1),
    (case("blocks", 1, 1, "bf16", 2, pp=2, schedule="zb_h1", recompute=True), 0.02),
    (case("cut", 1, 0, "fp32", tp=2), 0.02),
]


def measured_peaks(cases: list[Job]) -> list[int]:
    """Of this rank, in each configuration's third step."""
    return [_measured_peak(each) for each in cases]


def _measured_peak(job: Job) -> int:
    torch.manual_seed(0)
    subject = subject_of(job, device="cpu")
    assert subject.batch is not None
    batch, subject = subject.batch(rows_of_rank(job)), subject.piped_for(job)
    step = subject.step(job)
    state = step.init(subject.params)
    del subject
    for _ in range(2):
        state, _ = step(state, batch)
    fold = gloo.fold
    with recorded(state, batch) as run:

        def seen(*args: Any, **options: Any) -> Tensor:
            with run:  # on the thread that reduces
                return fold(*args, **options)

        with mock.patch.object(gloo, "fold", seen):
            state, _ = step(state, batch)
    return run.events.peak()


@pytest.mark.law(20)
def test_two_processes_have_the_predicted_peaks() -> None:
    """Each rank of a pipeline its own; within 2 %, where sums are not on their way at the peak."""
    every = comm.spawn(measured_peaks, [each for each, _ in CASES], world_size=2, backend="gloo")
    for (job, error), *peaks in zip(CASES, *every, strict=True):
        ranks = first_ranks(job)  # the others do the same
        predicted = [step_shape(planned(job), job, rank=rank).peak for rank in ranks]
        assert predicted * (2 // len(ranks)) == pytest.approx(peaks, rel=error), name_of(job)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_collective_takes_memory_as_over_gloo(ranks: int) -> None:
    """Law: beside its input, a reduce-scatter takes a piece for each other rank; a donated all-reduce of two, one value."""

    def program() -> tuple[int, int]:
        with EventRecorder() as scattered:
            comm.reduce_scatter(torch.empty(6 * 1000, device="meta"))
        with EventRecorder() as reduced:
            comm.all_reduce(torch.empty(6 * 1000, device="meta"), donate=True)
        return scattered.events.peak(), reduced.events.peak()

    value = 4 * 6 * 1000
    piece = value // ranks
    found = rank_on_shapes(program, world_size=ranks, rank=0, kind=GlooShapesWorld)
    assert found == (value + (ranks - 1) * piece, 2 * value if ranks == 2 else value + (ranks - 1) * piece)


def test_results_have_the_shapes_of_other_worlds() -> None:
    def program(device: str) -> list[Any]:
        x = torch.ones(4, 6, device=device)
        found = [
            comm.all_gather(x),
            comm.reduce_scatter(x),
            comm.all_reduce([x, x[0].half()]),
            comm.broadcast(x, 1),
            comm.all_to_all(x),
            comm.permute(x, [(0, 1), (1, 0)]),
        ]
        return fds.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found)

    assert (
        rank_on_shapes(program, "meta", world_size=2, rank=1, kind=GlooShapesWorld)
        == comm.simulate(program, "cpu", world_size=2)[1]
    )
