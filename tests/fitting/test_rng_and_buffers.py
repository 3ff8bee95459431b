"""What steps use beside their state: a resumed run finds it as it was."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, fitting
from functional_ds import pipelining as pp
from functional_ds.fitting.rng_and_buffers import Outside
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
    state = fds.fit(
        step, state, batch, steps=steps, checkpoints=path and fds.Checkpoints(path, every=2), buffers=apply, **options
    )
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
    drawing = {"evaluation": fds.Evaluation(lambda state: {"drawn": torch.rand(3).sum()}, every=1)}
    assert_same(run(tmp_path / "evaluated", 6, dropout, **drawing), want)


def test_batches_that_are_drawn_again(tmp_path: Path) -> None:
    """A shuffle draws its seed from torch's generator: the resumed run draws it again, and then goes on where it was."""

    def go(path: Path, steps: int) -> Any:
        _, step, state = build(nn.Dropout(0.5))
        loader = torch.utils.data.DataLoader(batch(0), batch_size=2, shuffle=True)
        state = fds.fit(step, state, fitting.Epochs(loader, 3), steps=steps, checkpoints=path and fds.Checkpoints(path))
        return step.params(state)

    want = go(tmp_path / "whole", 4)
    go(tmp_path / "parts", 3)
    assert_same(go(tmp_path / "parts", 4), want)


@pytest.mark.parametrize(("saved", "found"), [(3, 2), (1, 2)])
def test_on_other_ranks_buffers_come_from_the_first(tmp_path: Path, saved: int, found: int) -> None:
    norm = lambda: nn.BatchNorm1d(4)  # noqa: E731
    before = comm.simulate(run, tmp_path / "run", 2, norm, world_size=saved)
    after = comm.simulate(run, tmp_path / "run", 2, norm, world_size=found)  # makes no more steps
    assert_same([buffers for _, buffers in after], [before[0][1]] * found)


def test_buffers_of_a_pipeline_come_to_their_stages(tmp_path: Path) -> None:
    """Whichever rank has a stage now."""

    def go(dp: int, steps: int) -> dict[str, Tensor]:
        mesh = comm.mesh(dp=dp, pp=2)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        stages, params = pp.cut(net, ["2"], loss=lambda y, batch: y.square().mean(), example=(torch.ones(4, 3),))
        step = fds.compose(fds.transforms.zero(1, mesh["dp"]), fds.transforms.pipeline(pp.gpipe(2, 2), stages, mesh["pp"]))(
            fds.train_step(stages, fds.sgd(0.1))
        )
        rows = lambda index: (torch.randn(8, 3, generator=torch.Generator().manual_seed(index))[4 * mesh["dp"].rank :][:4],)  # noqa: E731
        assert stages.apply is not None
        fds.fit(step, step.init(params), rows, steps=steps, checkpoints=fds.Checkpoints(tmp_path / "run"), buffers=stages.apply)
        return dict(stages.apply.buffers)

    before = comm.simulate(go, 2, 2, world_size=4)  # rank 0 has stage 0, rank 1 stage 1
    for rank, buffers in enumerate(comm.simulate(go, 1, 2, world_size=2)):
        own = "1." if rank == 0 else "3."
        assert_same(
            {k: v for k, v in buffers.items() if k.startswith(own)},
            {k: v for k, v in before[rank].items() if k.startswith(own)},
        )


def test_what_others_had_goes_stale() -> None:
    """A rank that took a stage's statistics from another, and does not run that stage, has none to say."""

    def mean(kept: Any, value: float) -> Any:
        apply, params = fds.functional(nn.ModuleList(nn.BatchNorm1d(1, momentum=1.0) for _ in range(2)))
        outside = Outside([apply])
        outside.restore(kept)
        rank = comm.world().rank
        apply.within(params, lambda module: module[rank](torch.full((4, 1), value + rank)))
        return outside.kept(), {name: b.item() for name, b in apply.buffers.items() if name.endswith("mean")}

    kept = comm.simulate(mean, None, 10.0, world_size=2)[0][0]
    kept = comm.simulate(mean, kept, 20.0, world_size=2)[0][0]
    assert comm.simulate(mean, kept, 30.0, world_size=1)[0][1] == {"0.running_mean": 30.0, "1.running_mean": 21.0}


class Lazy(nn.Module):
    """Makes a buffer as it goes, sets one that was none, and lets one grow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.zeros(2))
        self.table = self.table + x.detach().sum()
        self.mean = x.detach().mean(0) if self.mean is None else 0.5 * (self.mean + x.detach().mean(0))
        self.seen = torch.cat([self.seen, x.detach().sum().view(1)])
        return x * self.mean + self.seen.sum() + self.table.sum()


@pytest.mark.law(37)
def test_buffers_that_are_made_as_a_module_goes(tmp_path: Path) -> None:
    want = run(tmp_path / "whole", 6, Lazy)
    run(tmp_path / "parts", 4, Lazy)
    assert_same(run(tmp_path / "parts", 6, Lazy), want)


@pytest.mark.parametrize("bad", [0, 3])
def test_a_roll_back_takes_back_statistics(tmp_path: Path, bad: int) -> None:
    """They, too, have seen the batch that spoilt the run."""

    def go() -> dict[str, Tensor]:
        apply, step, state = build(nn.BatchNorm1d(4))
        fds.fit(
            step,
            state,
            lambda index: batch(index) * (float("nan") if index == bad else 1),
            steps=6,
            checkpoints=fds.Checkpoints(tmp_path / "run", every=1),
            logging=fds.Logging(every=1),
            on_non_finite=fitting.RollBack(after=1),
            buffers=apply,
        )
        return dict(apply.buffers)

    assert all(buffer.isfinite().all() for buffer in go().values())


def test_buffers_that_nobody_saves_are_told(tmp_path: Path) -> None:
    _, step, state = build(nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match=r"pass fit\(..., buffers=apply\)"):
        fds.fit(step, state, batch, steps=1, checkpoints=fds.Checkpoints(tmp_path / "run"))


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
        fds.fit(step, state, batch, steps=1, checkpoints=fds.Checkpoints(tmp_path / "run"))
    assert not apply.changed_buffers


def test_modules_that_others_trained_are_no_concern(tmp_path: Path) -> None:
    """Their buffers changed before."""
    apply, params = fds.functional(nn.BatchNorm1d(3))
    apply(params, torch.randn(4, 3))
    assert apply.changed_buffers
    _, step, state = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fds.fit(step, state, batch, steps=1, checkpoints=fds.Checkpoints(tmp_path / "run"))


def test_after_a_run_that_saved_none(tmp_path: Path) -> None:
    """Whoever was told of it can go on."""
    apply, step, state = build(nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match="pass fit"):
        fds.fit(step, state, batch, steps=1, checkpoints=fds.Checkpoints(tmp_path / "run"))
    apply, step, state = build(nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match="the checkpoint has none, so modules begin with their own"):
        fds.fit(step, state, batch, steps=2, checkpoints=fds.Checkpoints(tmp_path / "run"), buffers=apply)
    assert apply.buffers["1.num_batches_tracked"] == 1


def test_other_modules_than_were_saved(tmp_path: Path) -> None:
    run(tmp_path / "run", 1, lambda: nn.BatchNorm1d(4))
    _, step, state = build(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="has those of 1 modules, and fit was given 0"):
        fds.fit(step, state, batch, steps=2, checkpoints=fds.Checkpoints(tmp_path / "run"))
    with pytest.raises(TypeError, match=r"buffers=.* pass the function of a module that fds.functional gives"):
        fds.fit(step, state, batch, steps=2, buffers=nn.BatchNorm1d(4))
