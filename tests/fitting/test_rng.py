"""Generators and module buffers over a resume: a run that goes on is the run that was never interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, fitting
from functional_ds import pipelining as pp
from functional_ds.testing import assert_same, simulated_cuda


def batch(index: int) -> Tensor:
    rows = 3 + torch.randn(8, 3, generator=torch.Generator().manual_seed(index))
    return rows.tensor_split(comm.world().size)[comm.world().rank]


def build(*layers: nn.Module) -> tuple[fds.Step, fds.State]:
    """As a new process does it."""
    torch.manual_seed(comm.world().rank)
    net = nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    apply, params = fds.functional(net)
    step = fds.transforms.zero(1)(fds.train_step(lambda params, x: apply(params, x).square().mean(), fds.adamw(0.05)))
    return step, step.init(params)


def run(path: Path, steps: int, *layers: Any, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """The params and buffers after so many steps."""
    step, state = build(*(layer() for layer in layers))
    state = fds.fit(step, state, batch, steps=steps, checkpoints=fds.Checkpoints(path, every=2), **options)
    return step.params(state), step.module_buffers(state)


@pytest.mark.law(37)
@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_and_running_statistics_go_on(tmp_path: Path, ranks: int) -> None:
    layers = (lambda: nn.BatchNorm1d(4), lambda: nn.Dropout(0.5))
    want = comm.simulate(run, tmp_path / "whole", 6, *layers, world_size=ranks)
    comm.simulate(run, tmp_path / "parts", 4, *layers, world_size=ranks)
    assert_same(comm.simulate(run, tmp_path / "parts", 6, *layers, world_size=ranks), want)


@pytest.mark.law(37)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_devices_dropout_goes_on(tmp_path: Path, ranks: int) -> None:
    """The device draws from a generator of its own, also where the world's own tensors are on the host."""

    def go(name: str, steps: int) -> dict[str, Tensor]:
        with simulated_cuda():
            torch.manual_seed(comm.world().rank)
            apply, params = fds.functional(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).cuda())
            step = fds.transforms.zero(1)(fds.train_step(lambda params, x: apply(params, x).square().mean(), fds.adamw(0.05)))
            state = step.init({path: torch.full_like(leaf, 0.1) for path, leaf in params.items()})
            evaluation = fds.Evaluation(lambda state: {"drawn": torch.rand(3, device="cuda").sum()}, every=1)
            options: dict[str, Any] = {"evaluation": evaluation} if name == "evaluated" else {}
            checkpoints = fds.Checkpoints(tmp_path / name, every=2)
            state = fds.fit(step, state, lambda i: batch(i).cuda(), steps=steps, checkpoints=checkpoints, **options)
            return {path: leaf.cpu() for path, leaf in step.params(state).items()}

    want = comm.simulate(go, "whole", 6, world_size=ranks)
    assert_same(comm.simulate(go, "evaluated", 6, world_size=ranks), want)
    comm.simulate(go, "parts", 4, world_size=ranks)
    assert_same(comm.simulate(go, "parts", 6, world_size=ranks), want)


@pytest.mark.law(37)
def test_evaluations_draw_nothing_from_the_training(tmp_path: Path) -> None:
    dropout = lambda: nn.Dropout(0.5)  # noqa: E731
    want = run(tmp_path / "plain", 6, dropout)
    drawing = fds.Evaluation(lambda state: {"drawn": torch.rand(3).sum()}, every=1)
    assert_same(run(tmp_path / "evaluated", 6, dropout, evaluation=drawing), want)


def test_batches_that_are_drawn_again(tmp_path: Path) -> None:
    """A shuffle draws its seed from torch's generator: the resumed run draws it again, and then goes on where it was."""

    def go(path: Path, steps: int) -> Any:
        step, state = build(nn.Dropout(0.5))
        loader = torch.utils.data.DataLoader(batch(0), batch_size=2, shuffle=True)
        state = fds.fit(step, state, fitting.Epochs(loader, 3), steps=steps, checkpoints=fds.Checkpoints(path))
        return step.params(state)

    want = go(tmp_path / "whole", 4)
    go(tmp_path / "parts", 3)
    assert_same(go(tmp_path / "parts", 4), want)


@pytest.mark.parametrize(("saved", "found"), [(3, 2), (1, 2)])
def test_other_ranks_have_the_same_buffers(tmp_path: Path, saved: int, found: int) -> None:
    norm = lambda: nn.BatchNorm1d(4)  # noqa: E731
    before = comm.simulate(run, tmp_path / "run", 2, norm, world_size=saved)
    after = comm.simulate(run, tmp_path / "run", 2, norm, world_size=found)  # makes no more steps
    assert_same([buffers for _, buffers in after], [before[0][1]] * found)


def test_buffers_of_a_pipeline_come_to_their_stages(tmp_path: Path) -> None:
    """Whichever rank has a stage now: the run on other ranks is the one that was never interrupted."""

    def go(path: Path, dp: int, steps: int) -> Any:
        mesh = comm.mesh(dp=dp, pp=2)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        stages, params = pp.cut(net, ["2"], loss=lambda y, batch: y.square().mean(), example=(torch.ones(4, 3),))
        step = fds.compose(fds.transforms.zero(1, mesh["dp"]), fds.transforms.pipeline(pp.gpipe(2, 2), stages, mesh["pp"]))(
            fds.train_step(stages, fds.sgd(0.1))
        )
        rows = lambda index: (torch.randn(8, 3, generator=torch.Generator().manual_seed(index))[4 * mesh["dp"].rank :][:4],)  # noqa: E731
        state = fds.fit(step, step.init(params), rows, steps=steps, checkpoints=fds.Checkpoints(path))
        return step.params(state), step.module_buffers(state)

    before = comm.simulate(go, tmp_path / "run", 2, 2, world_size=4)
    for params, buffers in comm.simulate(go, tmp_path / "run", 1, 2, world_size=2):  # makes no more steps
        assert_same(params, before[0][0])
        assert_same(buffers, before[0][1])


@pytest.mark.parametrize("bad", [0, 3])
def test_a_roll_back_takes_back_statistics(tmp_path: Path, bad: int) -> None:
    """They, too, have seen the batch that spoilt the run."""
    step, state = build(nn.BatchNorm1d(4))
    state = fds.fit(
        step,
        state,
        lambda index: batch(index) * (float("nan") if index == bad else 1),
        steps=6,
        checkpoints=fds.Checkpoints(tmp_path / "run", every=1),
        logging=fds.Logging(every=1),
        on_non_finite=fitting.RollBack(after=1),
    )
    assert all(buffer.isfinite().all() for buffer in step.module_buffers(state).values())
