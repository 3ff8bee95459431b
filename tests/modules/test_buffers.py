"""Buffers of modules as functions: one value for all copies of a thread, whoever ran last and however."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from functional_ds.testing import assert_same


class Counting(nn.Module):
    """Counts its calls in a buffer that each call replaces, and keeps what it computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(3.0)
        self.calls = self.calls + 1
        y: Tensor = self.inner(x) + self.cache
        return y


def test_params_of_two_trees_share_buffers() -> None:
    apply, params = fds.functional(Counting())
    trees = {"one": params, "other": {name: 2 * p for name, p in params.items()}}
    step = fds.train_step(lambda p, x: (apply(p["one"], x) * apply(p["other"], x)).mean(), fds.sgd(0.1))
    state = step.init(trees)
    for count in (2, 4, 6):
        state, _ = step(state, torch.ones(2, 3))
        assert apply.buffers["calls"] == count


def test_a_trial_without_values_leaves_nothing() -> None:
    """Neither in buffers nor in what a module keeps for itself."""
    apply, params = fds.functional(Counting())
    want = apply.buffers["calls"].clone()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        apply({name: mode.from_tensor(p) for name, p in params.items()}, torch.empty(2, 3))
    assert_same(apply.buffers["calls"], want)
    assert not apply.changed_buffers
    assert apply(params, torch.ones(2, 3)).isfinite().all()
    assert apply.buffers["calls"] == 1


def test_modules_that_keep_what_they_computed_run_in_pipelines() -> None:
    net = nn.Sequential(Counting(), Counting())
    batch = (torch.randn(4, 3),)
    stages, params = pp.cut(net, 2, loss=lambda y, batch: y.square().mean(), example=batch)

    def program() -> Any:
        step = transforms.pipeline(pp.gpipe(2, 2), stages)(fds.train_step(stages, fds.sgd(0.1)))
        return step.params(step(step.init(params), batch)[0])

    step = fds.train_step(stages, fds.sgd(0.1))
    want = step.params(step(step.init(params), batch)[0])
    for found in comm.simulate(program, world_size=2):
        torch.testing.assert_close(found, want)


def test_a_first_call_in_inference_mode_does_not_spoil_training() -> None:
    apply, params = fds.functional(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    with torch.inference_mode():
        apply(params, torch.ones(2, 3))
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
    step(step.init(params), torch.randn(4, 3))
    assert apply.buffers["1.num_batches_tracked"] == 2


class Tables(nn.Module):
    """Makes a table at its first call, and replaces a mean at each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("table", None)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.cos(torch.arange(3.0))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y: Tensor = self.inner(x) * self.table + self.mean
        return y


@pytest.mark.parametrize("more", [(), (transforms.remat(""),)])
def test_what_a_call_makes_in_inference_mode_is_plain(more: tuple[fds.Transform, ...]) -> None:
    apply, params = fds.functional(Tables())
    step = fds.compose(*more)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
    state = step.init(params)
    with torch.inference_mode():
        step.evaluate(state, torch.ones(2, 3))
    state, _ = step(state, torch.ones(2, 3))
    apply.put_buffers({"mean": torch.ones(3), "table": torch.zeros(4)})
    assert_same(apply.buffers, {"table": torch.zeros(4), "mean": torch.ones(3)})


class Ready(nn.Module):
    """Sets itself up by the first values that it sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("shift", torch.zeros(width))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if not self.ready:
            self.shift, self.ready = y.detach().mean(0), True
        return torch.tanh(y - self.shift)


def test_stages_of_a_rank_keep_their_own_copies() -> None:
    """From step to step: what else a module keeps fits its buffers."""
    torch.manual_seed(0)
    net, batch = nn.Sequential(*(Ready(3) for _ in range(4))), (torch.randn(4, 3),)

    def run(schedule: pp.Schedule, world_size: int) -> Any:
        stages, params = pp.cut(net, 4, loss=lambda y, batch: y.square().mean(), example=batch)

        def program() -> Any:
            step = transforms.pipeline(schedule, stages)(fds.train_step(stages, fds.sgd(0.1)))
            state = step.init(params)
            for _ in range(3):
                state, _ = step(state, batch)
            return step.params(state)

        return comm.simulate(program, world_size=world_size)[0]

    found, want = run(pp.interleaved_one_f_one_b(2, 2), 2), run(pp.gpipe(4, 2), 4)
    for path, leaf in found.items():
        torch.testing.assert_close(leaf, want[path])


@pytest.mark.parametrize("again", [fds.remat, lambda function: function])
def test_a_backward_in_its_own_thread_finds_the_buffers(again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine has one for each GPU: what is recomputed there reads what this thread has learned."""
    own = torch.autograd.grad

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []
        worker = threading.Thread(target=lambda: found.append(own(*args, **kwargs)))
        worker.start()
        worker.join()
        return found[0]

    def run() -> Any:
        torch.manual_seed(0)
        apply, params = fds.functional(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()))
        apply.put_buffers({"1.running_mean": torch.ones(3), "1.running_var": torch.full((3,), 4.0)})
        apply.module.eval()
        step = fds.train_step(lambda p, x: again(lambda x: apply(p, x))(x).square().mean(), fds.sgd(0.1))
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, torch.ones(4, 3))
        return step.params(state), apply.buffers

    want = run()
    monkeypatch.setattr(torch.autograd, "grad", elsewhere)
    assert_same(run(), want)


def test_what_is_put_and_what_is_no_module() -> None:
    apply, _ = fds.functional(nn.Sequential(nn.BatchNorm1d(2)))
    apply.put_buffers({"0.running_mean": torch.ones(2)})
    assert [*apply.changed_buffers] == ["0.running_mean"]
    with pytest.raises(ValueError, match=r"'1.running_mean' is a buffer of no module here"):
        apply.put_buffers({"1.running_mean": torch.ones(2)})


class Graph(nn.Module):
    """Has a sparse buffer, and a plain attribute that its caller sets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.factor = 1
        self.register_buffer("adjacency", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.adjacency @ self.inner(x) * self.factor
        return y


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Graph()])

    def forward(self, x: Tensor) -> Tensor:
        for factor in (1, 2, 3):
            self.blocks[0].factor = factor
            x = torch.tanh(self.blocks[0](x))
        return x


def test_sparse_buffers_and_attributes_that_callers_set() -> None:
    def run(*more: fds.Transform) -> Any:
        torch.manual_seed(0)
        apply, params = fds.functional(Repeated())
        step = fds.compose(*more)(fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1)))
        return step.params(fds.fit(step, step.init(params), lambda index: torch.ones(4, 3), steps=2))

    assert_same(run(transforms.remat()), run())
    assert_same(run(transforms.remat("")), run())
