"""What a loss does only in later steps, or on some ranks: right, or refused by name, as in the first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.step.views import graph_checks

Batch = tuple[Tensor, Tensor]

STRATEGIES: dict[str, tuple[int, Callable[[], list[Any]]]] = {
    "none": (1, list),
    "zero 0": (2, lambda: [T.zero(0)]),
    "zero 1": (2, lambda: [T.zero(1)]),
    "zero 3": (2, lambda: [T.zero(3, unit_of=str, max_live_units=1, prefetch=0)]),
}


class Model(nn.Module):
    """Two linears, and a frozen target."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o, self.n = nn.Linear(4, 4), nn.Linear(4, 3), 0
        self.target = nn.Linear(4, 3).requires_grad_(False)

    def loss(self, batch: Batch) -> Tensor:
        x, y = batch
        return F.mse_loss(self.o(self.a(x).tanh()), y) + F.mse_loss(self.o(x), self.target(x))

    def forward(self, batch: Batch) -> Tensor:
        self.n += 1
        return self.loss(batch)


def _batch(step: int) -> Batch:
    draws = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=draws), torch.randn(8, 3, generator=draws)


def _ours(build: Callable[[], nn.Module], strategy: Callable[[], list[Any]], loss: Any = None, steps: int = 4) -> Any:
    torch.manual_seed(5)
    module, here = build(), comm.world()
    apply, params = fds.functional(module)
    of = apply if loss is None else (lambda params, batch: loss(apply, module, params, batch))
    step = fds.compose(*strategy())(fds.train_step(of, fds.sgd(0.05)))
    state = step.init(params)
    for number in range(steps):
        state, _ = step(state, tuple(x.tensor_split(here.size)[here.rank] for x in _batch(number)))
    return step.params(state)


def _theirs(build: Callable[[], nn.Module], steps: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for number in range(steps):
        optimizer.zero_grad()
        module(_batch(number)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def _check(name: str, build: Callable[[], nn.Module], refused: str | None = None, loss: Any = None) -> None:
    size, strategy = STRATEGIES[name]
    if refused is not None:
        with pytest.raises(RuntimeError, match=refused):
            comm.simulate(_ours, build, strategy, loss, world_size=size)
        return
    found, wanted = comm.simulate(_ours, build, strategy, loss, world_size=size)[0], _theirs(build)
    for path, value in wanted.items():
        torch.testing.assert_close(found[path], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_original_module_in_a_later_step_is_refused(name: str) -> None:
    def loss(apply: Any, module: Model, params: Any, batch: Batch) -> Tensor:
        apply.module.count = getattr(apply.module, "count", 0) + 1
        return apply(params, batch) if apply.module.count < 3 else module(batch)

    _check(name, Model, "not one of the step's params", loss)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_reentrant_checkpoint_in_a_later_step_is_refused(name: str) -> None:
    class Late(Model):
        def loss(self, batch: Batch) -> Tensor:
            x, y = batch
            if self.n < 2:
                return F.mse_loss(self.o(self.a(x).tanh()), y)
            hidden = checkpoint(lambda x: self.a(x).tanh(), x.requires_grad_(), use_reentrant=True)
            return F.mse_loss(self.o(hidden), y)

    _check(name, Late, "use_reentrant=False")


def _copied(self: Model) -> None:
    with torch.no_grad():
        for p, q in zip(self.target.parameters(), self.o.parameters(), strict=True):
            p.copy_(q)


def _set(self: Model) -> None:
    for p, q in zip(self.target.parameters(), self.o.parameters(), strict=True):
        p.data = q.data.clone()


def _clamped(self: Model) -> None:
    self.a.weight.data.clamp_(-0.2, 0.2)


@pytest.mark.parametrize(
    ("write", "name", "refused"),
    [
        (_copied, "none", "wrote into its frozen parameter 'target.weight'"),
        (_copied, "zero 3", r"wrote into the parameter 'target\.\w+' in place"),
        (_set, "none", "wrote into its frozen parameter 'target.weight'"),
        (_set, "zero 0", "set the data of a parameter"),
        (_set, "zero 1", "set the data of a parameter"),
        (_set, "zero 3", "set the data of a parameter"),
        (_clamped, "zero 3", "wrote into the parameter 'a.weight' in place"),
        (_copied, "zero 1", r"wrote into the parameter 'target\.\w+' in place"),
    ],
)
def test_writes_in_a_later_step(write: Callable[[Model], None], name: str, refused: str | None) -> None:
    class Writing(Model):
        def loss(self, batch: Batch) -> Tensor:
            if self.n == 2:
                write(self)
            return super().loss(batch)

    _check(name, Writing, refused)


class _Block(torch.autograd.Function):
    """Its backward pass adds to ``grad`` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x)
        with torch.no_grad():
            return linear(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            of_x, *of_params = torch.autograd.grad(ctx.linear(x), [x, *ctx.linear.parameters()], grad)
        for p, each in zip(ctx.linear.parameters(), of_params, strict=True):
            p.grad = each if p.grad is None else p.grad + each
        return of_x, None


class _Assigning(Model):
    def loss(self, batch: Batch) -> Tensor:
        x, y = batch
        return F.mse_loss(self.o(_Block.apply(x * 1 + self.a.bias, self.a).tanh()), y)


class _AssigningByHook(Model):
    def loss(self, batch: Batch) -> Tensor:
        x, y = batch
        out = self.o(self.a(x).tanh())

        def hook(grad: Tensor) -> None:
            weight, more = self.o.weight, grad.t() @ x * 0.1
            weight.grad = more if weight.grad is None else weight.grad + more

        out.register_hook(hook)
        return F.mse_loss(out, y)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("build", [_Assigning, _AssigningByHook])
def test_grads_that_a_backward_pass_assigns(build: type[Model], name: str) -> None:
    _check(name, build)


@pytest.mark.parametrize("name", STRATEGIES)
def test_hooks_after_accumulation_are_refused(name: str) -> None:
    class Hooked(Model):
        def loss(self, batch: Batch) -> Tensor:
            self.a.weight.register_post_accumulate_grad_hook(lambda p: None)
            return super().loss(batch)

    _check(name, Hooked, "use register_hook")


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torch_func_where_runtime_errors_are_caught(name: str) -> None:
    class Caught(Model):
        def loss(self, batch: Batch) -> Tensor:
            x, _ = batch
            try:
                _, slope = torch.func.jvp(lambda x: self.o(self.a(x).tanh()), (x,), (torch.ones_like(x),))
            except RuntimeError:
                slope = x * 100
            return super().loss(batch) + slope.square().mean()

    _check(name, Caught)


def test_draws_are_repeated_where_torch_func_comes_in_a_later_step() -> None:
    class Late(Model):
        def loss(self, batch: Batch) -> Tensor:
            x, y = batch
            hidden = F.dropout(self.a(x).tanh(), 0.5)
            found = F.mse_loss(self.o(hidden), y)
            if self.n >= 2:
                found = found + torch.func.vmap(torch.func.grad(lambda x: self.o(self.a(x).tanh()).sum()))(x).square().mean()
            return found

    def program(stage: int) -> Any:
        return _ours(Late, lambda: [T.zero(stage, unit_of=str, **({"max_live_units": 1, "prefetch": 0} if stage == 3 else {}))])

    found, wanted = (comm.simulate(program, stage, world_size=2)[0] for stage in (3, 0))
    for path, value in wanted.items():
        torch.testing.assert_close(found[path], value, atol=1e-6, rtol=1e-5)


def test_a_metric_with_the_name_of_the_loss_is_refused() -> None:
    step = fds.train_step(lambda params, x: (params["w"].sum(), {"loss": x}), fds.sgd(0.1))
    with pytest.raises(ValueError, match='metric named "loss"'):
        step(step.init({"w": torch.ones(2)}), torch.zeros(()))


@pytest.mark.parametrize("evaluates", [False, True])
def test_metrics_with_other_names_on_another_rank_are_refused(evaluates: bool) -> None:
    def program() -> None:
        name = "ab"[comm.world().rank]
        step = T.zero(0)(fds.train_step(lambda params, x: (params["w"].sum(), {name: x}), fds.sgd(0.1)))
        state = step.init({"w": torch.ones(2)})
        step.measure(state, torch.zeros(())) if evaluates else step(state, torch.zeros(()))

    with pytest.raises(ValueError, match=r"on this rank, and others on another rank"):
        comm.simulate(program, world_size=2)


@pytest.mark.parametrize("evaluates", [False, True])
def test_metrics_with_other_names_in_a_later_step_are_refused(evaluates: bool) -> None:
    """Though this rank has returned them before, and each rank has returned both."""

    def program() -> None:
        step = T.zero(0)(fds.train_step(lambda params, x: (params["w"].sum(), {"ab"[int(x)]: x}), fds.sgd(0.1)))
        state = step.init({"w": torch.ones(2)})
        for turn in (0, 1, comm.world().rank):
            batch = torch.tensor(float(turn))
            state = state if evaluates and step.measure(state, batch) else step(state, batch)[0]

    with pytest.raises(ValueError, match=r"the metrics \['b'\], and \['a'\] before; .* the same metrics in every"):
        comm.simulate(program, world_size=2)


@pytest.mark.parametrize("alias", [lambda s: s.put(), fds.tree.replace, lambda s: __import__("copy").copy(s)])
def test_aliases_of_a_donated_state_are_refused(alias: Callable[[Any], Any]) -> None:
    step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.1))
    state = step.init({"w": torch.ones(2)})
    other, copied = alias(state), state.clone()
    state, _ = step(state, torch.ones(2))
    with pytest.raises(fds.DonatedStateError, match=r"state\.clone\(\)"):
        step.params(other)
    with pytest.raises(fds.DonatedStateError):
        step(other, torch.ones(2))
    assert step.params(copied)["w"].tolist() == [1.0, 1.0]
    assert step.params(state)["w"].tolist() == pytest.approx([0.9, 0.9])


class _Noted(torch.autograd.Function):
    """Notes whether the backward pass may use threads of its own, as it does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: list[bool]) -> Tensor:
        ctx.noted = noted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        guard = torch.autograd.grad_mode.set_multithreading_enabled(False)
        ctx.noted.append(guard.prev)
        torch.autograd.grad_mode.set_multithreading_enabled(guard.prev)
        return grad, None


@pytest.mark.parametrize("name", ["plain", "zero 3", "pipeline"])
def test_backward_passes_stay_in_the_thread_whose_tape_a_recomputation_looks_for(name: str) -> None:
    noted: list[bool] = []

    def layer(params: Any, x: Tensor) -> Tensor:
        return _Noted.apply(x @ params["w"], noted)

    stages = pp.stages([layer], [{"w": torch.ones(2, 2)}], inputs=lambda batch: batch, loss=lambda x, batch: x.sum())
    strategy = {"plain": [], "zero 3": [T.zero(3)], "pipeline": [T.pipeline(pp.one_f_one_b(1, 2), stages)]}[name]
    step = fds.compose(*strategy)(fds.train_step(stages, fds.sgd(0.1)))
    step(step.init([{"w": torch.ones(2, 2)}]), torch.ones(4, 2))
    assert noted
    assert not any(noted)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_frozen_quantized_param_is_left_alone() -> None:
    """Its bits cannot be summed."""
    frozen = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8)
    step = fds.train_step(lambda p, x: (x @ p["w"] + p["q"].dequantize()).square().mean(), fds.sgd(0.1))
    state, _ = step(step.init({"w": torch.ones(4, 4), "q": frozen}), torch.ones(2, 4))
    assert torch.equal(state.params["q"].int_repr(), frozen.int_repr())


def _pipeline() -> list[Any]:
    parts = [fds.functional(nn.Linear(4, 4)) for _ in range(2)]
    stages = pp.stages(
        [apply for apply, _ in parts], [p for _, p in parts], inputs=lambda x: x, loss=lambda y, x: y.square().mean()
    )
    return [
        T.pipeline(pp.interleaved_one_f_one_b(1, 2, v=2), stages)(fds.train_step(stages, fds.sgd(0.05))),
        [p for _, p in parts],
    ]


def _whole(*strategy: Any) -> list[Any]:
    apply, params = fds.functional(nn.Linear(4, 4))
    return [fds.compose(*strategy)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.05))), params]


COMPARING: dict[str, Callable[[], list[Any]]] = {
    "none": _whole,
    "accumulate": lambda: _whole(T.accumulate(2)),
    "zero 2": lambda: _whole(T.zero(2)),
    "zero 3": lambda: _whole(T.zero(3)),
    "pipeline": _pipeline,
}


@pytest.mark.parametrize("strategy", COMPARING)
def test_values_of_params_are_compared_in_the_first_step_alone(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at all bits costs a pass over the params' memory."""
    looks, bits = 0, graph_checks.bit_sums

    def looking(param: Tensor) -> tuple[Tensor, ...]:
        nonlocal looks
        looks += 1
        return bits(param)

    monkeypatch.setattr(graph_checks, "bit_sums", looking)
    step, params = COMPARING[strategy]()
    state, counts = step.init(params), []
    for index in range(3):
        looks = 0
        state, _ = step(state, _batch(index)[0])
        counts.append(looks)
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
