"""What steps use beside their state: a resumed run finds it as it was."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, fitting
from functional_ds.testing import assert_same


def batch(index: int) -> Tensor:
    rows = 3 + torch.randn(8, 3, generator=torch.Generator().manual_seed(index))
    return rows.tensor_split(comm.world().size)[comm.world().rank]


def build(*layers: nn.Module) -> tuple[Any, fds.Step, fds.State]:
    """As a new process does it."""
    torch.manual_seed(comm.world().rank)
    net = nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    apply, params = fds.functional(net)
    step = fds.transforms.zero(1)(fds.train_step(lambda params, x: apply(params, x).square().mean(), fds.adamw(0.05)))
    return apply, step, step.init(params)


def run(path: Path, steps: int, *layers: Any, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """The params and buffers after so many steps."""
    apply, step, state = build(*(layer() for layer in layers))
    state = fds.fit(step, state, batch, steps=steps, path=path, every=2, buffers=apply, **options)
    return step.params(state), apply.buffers


@pytest.mark.law(37)
@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_and_running_statistics_go_on(tmp_path: Path, ranks: int) -> None:
    layers = (lambda: nn.BatchNorm1d(4), lambda: nn.Dropout(0.5))
    want = comm.simulate(run, tmp_path / "whole", 6, *layers, world_size=ranks)
    comm.simulate(run, tmp_path / "parts", 4, *layers, world_size=ranks)
    assert_same(comm.simulate(run, tmp_path / "parts", 6, *layers, world_size=ranks), want)


@pytest.mark.law(37)
def test_evaluations_draw_nothing_from_the_training(tmp_path: Path) -> None:
    dropout = lambda: nn.Dropout(0.5)  # noqa: E731
    want = run(tmp_path / "plain", 6, dropout)
    drawing = {"evaluate": lambda state: {"drawn": torch.rand(3).sum()}, "evaluate_every": 1}
    assert_same(run(tmp_path / "evaluated", 6, dropout, **drawing), want)


def test_batches_that_are_drawn_again(tmp_path: Path) -> None:
    """A shuffle draws its seed from torch's generator: the resumed run draws it again, and then goes on where it was."""

    def go(path: Path, steps: int) -> Any:
        _, step, state = build(nn.Dropout(0.5))
        loader = torch.utils.data.DataLoader(batch(0), batch_size=2, shuffle=True)
        state = fds.fit(step, state, fitting.Epochs(loader, 3), steps=steps, path=path)
        return step.params(state)

    want = go(tmp_path / "whole", 4)
    go(tmp_path / "parts", 3)
    assert_same(go(tmp_path / "parts", 4), want)


def test_on_other_ranks_buffers_come_and_generators_stay(tmp_path: Path) -> None:
    norm = lambda: nn.BatchNorm1d(4)  # noqa: E731
    saved = comm.simulate(run, tmp_path / "run", 2, norm, world_size=3)
    found = comm.simulate(run, tmp_path / "run", 2, norm, world_size=2)  # makes no more steps
    assert_same([buffers for _, buffers in found], [buffers for _, buffers in saved[:2]])


def test_a_roll_back_takes_back_statistics(tmp_path: Path) -> None:
    """They, too, have seen the batch that spoilt the run."""

    def go() -> dict[str, Tensor]:
        apply, step, state = build(nn.BatchNorm1d(4))
        fds.fit(
            step,
            state,
            lambda index: batch(index) * (float("nan") if index == 3 else 1),
            steps=6,
            path=tmp_path / "run",
            every=1,
            log_every=1,
            on_non_finite=fitting.RollBack(after=1),
            buffers=apply,
        )
        return dict(apply.buffers)

    assert all(buffer.isfinite().all() for buffer in go().values())


def test_buffers_that_nobody_saves_are_told(tmp_path: Path) -> None:
    _, step, state = build(nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match=r"pass fit\(..., buffers=apply\)"):
        fds.fit(step, state, batch, steps=1, path=tmp_path / "run")


def test_buffers_that_never_change_are_not_kept(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask

    apply, step, state = build(Masked())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fds.fit(step, state, batch, steps=1, path=tmp_path / "run")
    assert not apply.changed_buffers


def test_other_modules_than_were_saved(tmp_path: Path) -> None:
    run(tmp_path / "run", 1, lambda: nn.BatchNorm1d(4))
    _, step, state = build(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="has those of 1 modules, and fit was given 0"):
        fds.fit(step, state, batch, steps=2, path=tmp_path / "run")
    with pytest.raises(TypeError, match=r"buffers=.* pass the function of a module that fds.functional gives"):
        fds.fit(step, state, batch, steps=2, buffers=nn.BatchNorm1d(4))
