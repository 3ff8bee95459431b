"""Losses that differentiate: inner gradients, backward passes within passes, torch.func. The oracle is plain PyTorch."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

Call = Callable[[Mapping[str, Tensor], Tensor], Tensor]
Loss = Callable[[Call, dict[str, Tensor], Tensor], Any]
STAGES = (0, 1, 2, 3)
ROWS = 8


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def data() -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))


def fit(call: Call, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return (call(params, x) - x.sum(1, keepdim=True).sin()).square().mean()


# -- losses ------------------------------------------------------------------------------------------------------------


def sam(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    grads = torch.autograd.grad(fit(call, params, x), list(params.values()))
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    moved = {path: leaf + 0.05 * grad / norm for (path, leaf), grad in zip(params.items(), grads, strict=True)}
    return fit(call, moved, x)


def maml(call: Call, params: dict[str, Tensor], x: Tensor, *, second: bool = True) -> Tensor:
    support, query = x[: len(x) // 2], x[len(x) // 2 :]
    fast = params
    for _ in range(2):
        grads = torch.autograd.grad(fit(call, fast, support), list(fast.values()), create_graph=second)
        fast = {path: leaf - 0.1 * grad for (path, leaf), grad in zip(fast.items(), grads, strict=True)}
    return fit(call, fast, query)


def fomaml(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return maml(call, params, x, second=False)


def penalty(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    loss = fit(call, params, x)
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    return loss + 0.1 * torch.stack([grad.square().sum() for grad in grads]).sum()


def input_penalty(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(call(params, x).sum(), x, create_graph=True)
    return fit(call, params, x) + (grad.norm(dim=1) - 1).square().mean()


def hessian_product(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    loss = fit(call, params, x)
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    product = torch.stack([(grad * torch.cos(grad.detach())).sum() for grad in grads]).sum()
    curved = torch.autograd.grad(product, list(params.values()), create_graph=True, allow_unused=True)
    return loss + 0.1 * torch.stack([grad.square().sum() for grad in curved if grad is not None]).sum()


def sharpness(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """SAM as many write it: a ``backward()`` within the loss, and ``.grad``."""
    fit(call, params, x).backward()
    norm = torch.stack([leaf.grad.square().sum() for leaf in params.values() if leaf.grad is not None]).sum().sqrt()
    grads = {path: leaf.grad.clone() for path, leaf in params.items() if leaf.grad is not None}
    assert grads.keys() == params.keys()
    for leaf in params.values():
        leaf.grad = None
    fit(call, {path: leaf * 1.0 for path, leaf in params.items()}, x).backward()
    assert all(torch.equal(leaf.grad, grads[path]) for path, leaf in params.items() if leaf.grad is not None)
    return fit(call, {path: leaf + 0.05 * grads[path] / norm for path, leaf in params.items()}, x)


def heat(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """A physics-informed loss: second derivatives by the inputs."""
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(call(params, x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (first[:, 1] - 0.3 * second[:, 0]).square().mean() + fit(call, params, x)


LOSSES = (sam, maml, fomaml, penalty, input_penalty, hessian_product, sharpness, heat)


# -- the two programs --------------------------------------------------------------------------------------------------


def plain(loss: Loss, world_size: int, k: int = 1, steps: int = 3) -> dict[str, Tensor]:
    """Plain PyTorch on one device: the mean over all ranks' micro-batches."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        held = dict(module.named_parameters())
        total = {path: torch.zeros_like(leaf) for path, leaf in held.items()}
        for rows in data().chunk(world_size * k):
            optimizer.zero_grad()
            value = loss(lambda params, x: torch.func.functional_call(module, params, x), held, rows)
            optimizer.zero_grad()
            value.backward()
            for path, leaf in held.items():
                total[path] += leaf.grad / (world_size * k)
        for path, leaf in held.items():
            leaf.grad = total[path]
        optimizer.step()
    return {path: leaf.detach() for path, leaf in module.named_parameters()}


def trained(loss: Loss, *strategy: fds.Transform, steps: int = 3) -> dict[str, Tensor]:
    apply, params = fds.functional(network())
    step = fds.train_step(lambda params, x: loss(apply, params, x), fds.sgd(0.1, momentum=0.9))
    step = fds.compose(*strategy)(step)
    state, here = step.init(params), comm.world()
    for _ in range(steps):
        state, _ = step(state, data().chunk(here.size)[here.rank])
    return step.params(state)


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, tolerance: float = 2e-5) -> None:
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        torch.testing.assert_close(found[path], leaf, rtol=tolerance, atol=tolerance, msg=lambda m, path=path: f"{path}: {m}")


def by_leaf(path: str) -> str:
    return path


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [None, *STAGES])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_that_differentiate(loss: Loss, stage: int | None, world_size: int) -> None:
    """Each stage is plain PyTorch on the whole batch; stage 3 with a unit for each layer, of which one is whole at a time."""
    if stage is None:
        assert_same(trained(loss), plain(loss, 1))
        return
    few = {"max_live_units": 1, "prefetch": 0} if stage == 3 else {}
    wanted = plain(loss, world_size)
    for found in comm.simulate(lambda: trained(loss, T.zero(stage, unit_of=by_leaf, **few)), world_size=world_size):
        assert_same(found, wanted)


@pytest.mark.parametrize("stage", [None, 1, 3])
@pytest.mark.parametrize("loss", [sam, maml, penalty, heat, sharpness], ids=lambda loss: loss.__name__)
def test_with_other_transforms(loss: Loss, stage: int | None) -> None:
    """With micro-batches, recomputation and mixed precision on top."""
    zero = () if stage is None else (T.zero(stage, **({"max_live_units": 1} if stage == 3 else {})),)
    n = 1 if stage is None else 2

    def run(*strategy: fds.Transform) -> dict[str, Tensor]:
        return comm.simulate(lambda: trained(loss, *strategy), world_size=n)[0]

    assert_same(run(*zero, T.accumulate(2)), plain(loss, n, k=2))
    if loss is not sharpness:  # a checkpoint that is recomputed, and whose own backward pass runs inside of the loss
        assert_same(run(*zero, T.remat("[24]")), plain(loss, n))
    assert_same(run(T.mixed_precision("bf16"), *zero), plain(loss, n), tolerance=0.05)


def on_processes() -> list[dict[str, Tensor]]:
    return [trained(loss, T.zero(3, max_live_units=1)) for loss in (sam, maml, sharpness, heat)]


def test_processes_give_the_bits_of_the_simulator() -> None:
    for here, there in zip(comm.simulate(on_processes, world_size=2), comm.spawn(on_processes, world_size=2), strict=True):
        for one, other in zip(here, there, strict=True):
            assert all(torch.equal(one[path], other[path]) for path in one)


# -- evictions change no bit -------------------------------------------------------------------------------------------


def orders(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Each weight is used three times, with others between."""
    for path in ("a", "b", "a", "c", "b", "a", "c", "b", "c"):
        x = torch.tanh(x @ params[path]) + 0.1 * x
    return x.square().mean()


@pytest.mark.law(37)
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_evictions_change_no_bit(world_size: int, reshard: bool) -> None:
    """How many units are whole at once, and what earlier steps have planned, changes speed, never values."""
    weights = {path: torch.randn(8, 8, generator=torch.Generator().manual_seed(ord(path))) for path in "abc"}
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(9))

    def program(live: int, prefetch: int) -> list[dict[str, Tensor]]:
        zero = T.zero(3, unit_of=by_leaf, max_live_units=live, prefetch=prefetch, reshard_last_units=reshard)
        step = zero(fds.train_step(lambda params, x: orders(None, params, x), fds.adamw(0.01)))
        here, found = comm.world(), []
        rows = x.chunk(here.size)[here.rank]
        state = step.init(weights)
        for number in range(4):
            state, _ = step(state, rows)
            found.append(step.params(state))
            if number == 1:  # as after a restart: the plans are forgotten, and the values are not
                fresh = step.init(weights)
                state = fds.tree.unflatten(fds.tree.structure(fresh), fds.tree.leaves(state))
        return found

    wanted = comm.simulate(program, 3, 0, world_size=world_size)
    for live, prefetch in ((1, 0), (1, 2), (2, 1)):
        for found, other in zip(comm.simulate(program, live, prefetch, world_size=world_size), wanted, strict=True):
            for one, two in zip(found, other, strict=True):
                assert all(torch.equal(one[path], two[path]) for path in two), (live, prefetch)
    if world_size == 1:
        leaves = {path: leaf.clone().requires_grad_() for path, leaf in weights.items()}
        optimizer = torch.optim.AdamW(leaves.values(), lr=0.01, fused=True)
        for number in range(4):
            optimizer.zero_grad()
            orders(None, leaves, x).backward()
            optimizer.step()
            assert all(torch.equal(leaf, wanted[0][number][path]) for path, leaf in leaves.items())


def test_a_leaf_that_is_held_keeps_its_values() -> None:
    """A program may hold what an operation gave of a leaf, the leaf itself included, while others take its place."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        held = [leaf.contiguous() for leaf in params.values()]
        views = [leaf.t() for leaf in params.values()]
        for _ in range(2):
            for one, view, leaf in zip(held, views, params.values(), strict=True):
                x = torch.tanh(x @ one + x @ view) + x @ leaf
        return x.square().mean()

    weights = {path: torch.randn(4, 4, generator=torch.Generator().manual_seed(ord(path))) / 4 for path in "abcd"}

    def program(*strategy: fds.Transform) -> dict[str, Tensor]:
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1)))
        state = step.init(weights)
        for _ in range(3):
            state, _ = step(state, torch.ones(2, 4))
        return step.params(state)

    for found in comm.simulate(program, T.zero(3, unit_of=by_leaf, max_live_units=1), world_size=2):
        assert_same(found, program())


# -- backward passes within the backward pass --------------------------------------------------------------------------


class Recomputing(Function):
    """A checkpoint as reversible blocks and others write it: its backward runs autograd again, into the params' ``.grad``."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            found = ctx.function(x)
        torch.autograd.backward(found, grad)
        return None, x.grad


class Kept(Function):
    """The same with the graph of the forward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.found = function(ctx.x)
        return ctx.found.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        torch.autograd.backward(ctx.found, grad)
        return None, ctx.x.grad


class Reversible(nn.Module):
    """Blocks that only nested backward passes reach, blocks that both kinds reach, and plain ones."""

    def __init__(self, function: type[Function], first: int = 0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inp, self.out = nn.Linear(3, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.function, self.first, self.calls = function, first, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + self.function.apply(block, x)
        return self.out(torch.tanh(self.blocks[1](x)))


def reversible_plain(function: type[Function], parts: int) -> dict[str, Tensor]:
    module = Reversible(function)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for rows in data().chunk(parts):
            (fit(lambda _, x: module(x), {}, rows) / parts).backward()
        optimizer.step()
    return {path: leaf.detach() for path, leaf in module.named_parameters()}


def reversible(function: type[Function], *strategy: fds.Transform) -> dict[str, Tensor]:
    apply, params = fds.functional(Reversible(function))
    step = fds.train_step(lambda params, x: fit(apply, params, x), fds.sgd(0.1, momentum=0.9))
    step = fds.compose(*strategy)(step)
    state, here = step.init(params), comm.world()
    for _ in range(3):
        state, _ = step(state, data().chunk(here.size)[here.rank])
    return step.params(state)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [None, *STAGES])
@pytest.mark.parametrize("function", [Recomputing, Kept])
def test_functions_whose_backward_runs_autograd(function: type[Function], stage: int | None, world_size: int) -> None:
    if stage is None:
        assert_same(reversible(function), reversible_plain(function, 1))
        assert_same(reversible(function, T.accumulate(2)), reversible_plain(function, 2))
        return
    for more in ((), (T.accumulate(2),)):
        for few in ({}, {"max_live_units": 1, "prefetch": 0}) if stage == 3 else ({},):
            strategy = (T.zero(stage, **few), *more)
            wanted = reversible_plain(function, world_size * (2 if more else 1))
            for found in comm.simulate(lambda strategy=strategy: reversible(function, *strategy), world_size=world_size):
                assert_same(found, wanted)


@pytest.mark.parametrize("aggregate", ["all_reduce", "owner"])
def test_late_gradients_and_other_reductions(aggregate: str) -> None:
    wanted = reversible_plain(Recomputing, 2)
    for found in comm.simulate(lambda: reversible(Recomputing, T.zero(2, aggregate=aggregate)), world_size=2):
        assert_same(found, wanted)


def test_late_gradients_and_replicas() -> None:
    def program(*more: fds.Transform) -> dict[str, Tensor]:
        mesh = comm.mesh(replica=2, shard=2)
        return reversible(Recomputing, T.zero(3, mesh["shard"], replicate=mesh["replica"]), *more)

    for found in comm.simulate(program, world_size=4):
        assert_same(found, reversible_plain(Recomputing, 4))
    for found in comm.simulate(program, T.accumulate(2), world_size=4):
        assert_same(found, reversible_plain(Recomputing, 8))


def test_late_gradients_of_one_rank() -> None:
    """Only rank 1 runs the Function; the sums have its gradients."""

    def loss(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return torch.tanh(x @ params["w"])

        here = comm.world().rank == 1 if call is None else call(params, x)
        x = x * 1.0 + params["b"]
        return ((Recomputing.apply(body, x) if here else body(x)) @ params["v"]).square().mean()

    weights = {path: torch.randn(3, 3, generator=torch.Generator().manual_seed(ord(path))) for path in "vw"} | {
        "b": torch.ones(3)
    }

    def program() -> dict[str, Tensor]:
        step = T.zero(3, unit_of=by_leaf)(fds.train_step(lambda params, x: loss(None, params, x), fds.sgd(0.1)))
        state, here = step.init(weights), comm.world()
        for _ in range(3):
            state, _ = step(state, data().chunk(here.size)[here.rank])
        return step.params(state)

    leaves = {path: leaf.clone().requires_grad_() for path, leaf in weights.items()}
    for _ in range(3):
        value = torch.stack([loss(lambda params, x: False, leaves, rows) for rows in data().chunk(2)]).mean()
        for leaf, grad in zip(leaves.values(), torch.autograd.grad(value, list(leaves.values())), strict=True):
            leaf.data -= 0.1 * grad
    for found in comm.simulate(program, world_size=2):
        assert_same(found, leaves)


@pytest.mark.parametrize("stage", [1, 3])
def test_late_gradients_that_begin_later(stage: int) -> None:
    """Ranks agree in the first step on what they sum, so what only a later step does is refused."""
    calls = []

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        calls.append(None)

        def body(x: Tensor) -> Tensor:
            return torch.tanh(x @ params["w"])

        x = x * 1.0 + params["b"]
        return (Recomputing.apply(body, x) if len(calls) > 1 else body(x)).square().mean()

    step = T.zero(stage, unit_of=by_leaf)(fds.train_step(loss, fds.sgd(0.1)))
    state, _ = step(step.init({"w": torch.eye(3), "b": torch.ones(3)}), data())
    with pytest.raises(
        RuntimeError, match=r"custom autograd.Function ran another backward pass.*\['w'\] gradients.*first step"
    ):
        step(state, data())
