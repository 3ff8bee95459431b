"""Models that differ by design between the ranks of an axis: a run that is cut between two rounds goes on elsewhere as one."""

from pathlib import Path
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.testing import Problem, assert_same
from tests.planting import Bug, planted
from tests.transforms.test_every import plain_local_sgd

PROBLEM = Problem()


def program(folder: Path, stage: int, steps: range, *parts: fds.Transform, outer: int = 2) -> tuple[int, Any]:
    """Local SGD in rounds of three updates."""
    mesh = comm.mesh(outer=outer, inner=comm.world().size // outer)

    def mean(step: fds.Step, state: fds.State) -> fds.State:
        return fds.tree.replace(state, params=comm.all_reduce(state.params, mesh["outer"], op="avg"))

    strategy = T.every(3, mean), *parts, T.zero(stage, mesh["inner"]), T.apart(mesh["outer"])
    step = fds.compose(*strategy)(fds.train_step(PROBLEM.loss, fds.sgd(0.1)))
    state = step.init(PROBLEM.params)
    if steps.start:
        state = fds.load(folder, like=state)
    for index in steps:
        batch = PROBLEM.batches[index].chunk(2)[mesh["outer"].rank % 2]
        state, _ = step(state, batch.chunk(mesh["inner"].size)[mesh["inner"].rank])
    if steps.stop < 6:
        fds.save(state, folder)
    return mesh["outer"].rank, step.params(state)


@pytest.mark.law(19)
@pytest.mark.parametrize(("first", "then", "n"), [(3, 1, 2), (0, 3, 4), (2, 0, 6)])
def test_a_run_goes_on_elsewhere(first: int, then: int, n: int, tmp_path: Path) -> None:
    """Saved in the middle of a round on 2 models of 2 ranks; loaded into another stage and number of ranks of each."""
    comm.simulate(program, tmp_path, first, range(4), world_size=4)
    for _, params in comm.simulate(program, tmp_path, then, range(4, 6), world_size=n):
        torch.testing.assert_close(params, plain_local_sgd())


def test_masters_go_on_without_mixed_precision(tmp_path: Path) -> None:
    comm.simulate(program, tmp_path, 1, range(4), T.mixed_precision("bf16"), world_size=4)
    for _, params in comm.simulate(program, tmp_path, 3, range(4, 6), world_size=2):
        torch.testing.assert_close(params, plain_local_sgd(), rtol=0.05, atol=0.02)


def test_models_are_named(tmp_path: Path) -> None:
    comm.simulate(program, tmp_path, 3, range(4), world_size=4)
    with pytest.raises(fds.checkpointing.StructureError, match=r"outer\.2/"):
        comm.simulate(lambda: program(tmp_path, 1, range(4, 6), outer=4), world_size=4)


def test_several_models_are_not_exported(tmp_path: Path) -> None:
    def export() -> None:
        step = T.apart(comm.world())(fds.train_step(PROBLEM.loss, fds.sgd(0.1)))
        fds.export(step.init(PROBLEM.params), tmp_path)

    with pytest.raises(ValueError, match="export: the ranks have 2 models, of which this rank has number"):
        comm.simulate(export, world_size=2)


def own_run(folder: Path, stage: int, steps: range, what: str) -> tuple[int, Any, Any, list[int]]:
    """Two models of which one leaves a leaf unused, overflows once, or counts batch statistics of its own."""
    mesh = comm.mesh(outer=2, inner=comm.world().size // 2)
    model, strategy = mesh["outer"].rank, [T.zero(stage, mesh["inner"]), T.apart(mesh["outer"])]
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(PROBLEM.batches[0].shape[1], affine=False)
    apply, params = fds.functional(torch.nn.Sequential(norm, torch.nn.Linear(norm.num_features, 2)))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        if what == "buffers":
            return apply(params, x).square().mean()  # type: ignore[no-any-return]
        bias = params["1.bias"] if what == "unused" and model else 0.0
        return (x @ params["1.weight"].T + bias).square().mean()  # type: ignore[no-any-return]

    if what == "skipped":
        strategy.insert(0, T.mixed_precision("f32", T.DynamicScale(8.0, hysteresis=1)))
    step = fds.compose(*strategy)(fds.train_step(loss, fds.adamw(0.1)))
    state = step.init(params)
    state = fds.load(folder, like=state) if steps.start else state
    for index in steps:
        x = PROBLEM.batches[index][:4] * (float("inf") if what == "skipped" and model and not index else 1)
        state, _ = step(state, x + model)  # the same on the ranks of a model
    if steps.stop < 4:
        fds.save(state, folder)
    counts = [int(state.step), *map(int, state.idle.values())]
    return model, step.params(state), step.module_buffers(state), counts


@pytest.mark.law(37)
@pytest.mark.parametrize("what", ["unused", "skipped", "buffers"])
@pytest.mark.parametrize("n", [2, 4])
def test_each_model_has_its_own_counts_and_buffers(n: int, what: str, tmp_path: Path) -> None:
    """What is no leaf belongs to a model, too: skipped updates of leaves and steps, loss scales and running statistics."""
    whole = comm.simulate(own_run, tmp_path, 0, range(4), what, world_size=2)
    comm.simulate(own_run, tmp_path, 1, range(2), what, world_size=2)
    for model, *found in comm.simulate(own_run, tmp_path, 3, range(2, 4), what, world_size=n):
        torch.testing.assert_close(found, list(whole[model][1:]))


def test_models_of_processes_go_on_as_simulated_ones(tmp_path: Path) -> None:
    """Two processes save their counts of unused leaves amid a run; simulated ranks go on from there, in another stage."""
    whole = comm.simulate(own_run, tmp_path, 0, range(4), "unused", world_size=2)
    comm.spawn(own_run, tmp_path, 1, range(2), "unused", world_size=2)
    for model, *found in comm.simulate(own_run, tmp_path, 3, range(2, 4), "unused", world_size=4):
        torch.testing.assert_close(found, list(whole[model][1:]))


def overflowing(stage: int, steps: int) -> tuple[list[int], list[float], Any]:
    """Local SGD with a loss scale, of which one model's gradients overflow in the first step."""
    mesh = comm.mesh(outer=2, inner=comm.world().size // 2)

    def mean(step: fds.Step, state: fds.State) -> fds.State:
        return fds.tree.replace(state, params=comm.all_reduce(state.params, mesh["outer"], op="avg"))

    scale = T.mixed_precision("f32", T.DynamicScale(8.0, hysteresis=1))
    strategy = T.every(3, mean), scale, T.zero(stage, mesh["inner"]), T.apart(mesh["outer"])
    step = fds.compose(*strategy)(fds.train_step(PROBLEM.loss, fds.sgd(0.1)))
    state, counts, skipped = step.init(PROBLEM.params), [], []
    for index in range(steps):
        batch = PROBLEM.batches[max(index - 1, 0)].chunk(2)[mesh["outer"].rank]
        batch = batch.chunk(mesh["inner"].size)[mesh["inner"].rank]
        state, metrics = step(state, batch * float("inf") if index == 0 and mesh["outer"].rank else batch)
        counts.append(int(state.step))
        skipped.append(metrics["skipped"].item())
    return counts, skipped, step.params(state)


@pytest.mark.law(25)
@pytest.mark.parametrize(("stage", "n"), [(0, 2), (1, 4), (3, 4)])
def test_models_that_meet_skip_a_step_together(stage: int, n: int) -> None:
    """The overflow of one model's gradients is all models' skipped step, and they meet in the same update."""
    for counts, skipped, params in comm.simulate(overflowing, stage, 7, world_size=n):
        assert counts == [0, 1, 2, 3, 4, 5, 6]
        assert skipped == [1, 0, 0, 0, 0, 0, 0]
        torch.testing.assert_close(params, plain_local_sgd())


def test_models_of_processes_skip_a_step_together() -> None:
    assert_same(comm.spawn(overflowing, 0, 4, world_size=2), comm.simulate(overflowing, 0, 4, world_size=2))


ALONE = Bug("each model skips alone", "step.over_ranks.gradient_sums:finite", "meet and axis.role is AxisRole.APART", "False")


def test_a_planted_bug_of_skips_is_found() -> None:
    with planted(ALONE), pytest.raises(AssertionError):
        test_models_that_meet_skip_a_step_together(0, 2)


BUG = Bug("all models have one name", "step.state.slots:Apart.named", '"".join(models) + leaf', "leaf")


def test_a_planted_bug_is_found(tmp_path: Path) -> None:
    with planted(BUG), pytest.raises((AssertionError, ValueError, RuntimeError)):
        test_a_run_goes_on_elsewhere(3, 1, 2, tmp_path)


SHARED = Bug("counts are one for all models", "state_dict.describe:_of_model", "shard.per_rank", "'/' not in shard.name")


def test_a_planted_bug_of_counts_is_found(tmp_path: Path) -> None:
    with planted(SHARED), pytest.raises(fds.checkpointing.StructureError, match="idle"):
        test_each_model_has_its_own_counts_and_buffers(2, "unused", tmp_path)
