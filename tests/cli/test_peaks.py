"""The most bytes of tensors that a rank has at one time in a step: predicted, and measured on processes."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds.cli.planning.candidate import Candidate
from functional_ds.cli.planning.subject import subject_of
from functional_ds.cli.planning.values_free_step import step_shape
from functional_ds.comm.backends import gloo
from functional_ds.comm.worlds.gloo_shapes import GlooShapesWorld
from functional_ds.comm.worlds.shapes import rank_on_shapes
from functional_ds.dry_run.events import EventRecorder
from tests.cli.models_by_name import HERE

CUT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # else small leaves stay whole


def case(model: str, dp: int, stage: int, precision: str, accumulate: int = 1, **more: Any) -> tuple[str, Candidate]:
    rows = 2 if model == "attending" else 64
    config = CUT if stage == 3 else {}
    made = Candidate.of(config, dp, stage=stage, precision=precision, micro_batch=rows, accumulate=accumulate, **more)
    return f"{HERE}:{model}", made


# Sums of halves are folded in fp32 on another thread, whenever the other rank's message has come.
CASES = [
    (case("attending", 2, 0, "fp32", 2, recompute=True), 0.1),
    (case("blocks", 2, 3, "fp32"), 0.02),
    (case("blocks", 2, 3, "bf16", 2, recompute=True), 0.1),
    (case("blocks", 1, 1, "bf16", 2, pp=2, schedule="zb_h1", recompute=True), 0.02),
    (case("cut", 1, 0, "fp32", tp=2), 0.02),
]


def measured_peaks(cases: list[tuple[str, Candidate]]) -> list[int]:
    """Of this rank, in each configuration's third step."""
    return [_measured_peak(*each) for each in cases]


def _measured_peak(model: str, candidate: Candidate) -> int:
    torch.manual_seed(0)
    subject = subject_of(model, device="cpu")
    assert subject.batch is not None
    batch, subject = subject.batch(candidate.plan.batch.rows), subject.piped_for(candidate)
    step = subject.step(candidate)
    state = step.init(subject.params)
    del subject
    for _ in range(2):
        state, _ = step(state, batch)
    run, fold = EventRecorder(), gloo.fold

    def seen(*args: Any, **options: Any) -> Tensor:
        with run:  # on the thread that reduces
            return fold(*args, **options)

    with run, mock.patch.object(gloo, "fold", seen):
        run.note((state, batch))
        state, _ = step(state, batch)
    return run.events.peak()


@pytest.mark.law(20)
def test_two_processes_have_the_predicted_peaks() -> None:
    """Each rank of a pipeline its own; within 2 %, where sums are not on their way at the peak."""
    every = comm.spawn(measured_peaks, [each for each, _ in CASES], world_size=2, backend="gloo")
    for ((model, candidate), error), *peaks in zip(CASES, *every, strict=True):
        ranks = candidate.axes.first_ranks()  # the others do the same
        predicted = [step_shape(subject_of(model), candidate, rank=rank).peak for rank in ranks]
        assert predicted * (2 // len(ranks)) == pytest.approx(peaks, rel=error), candidate.name


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
