"""Losses that differentiate: inner gradients, backward passes within passes, torch.func. The oracle is plain PyTorch."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import CheckpointError, checkpoint

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.planting import Bug, planted

Call = Callable[[Mapping[str, Tensor], Tensor], Tensor]
Loss = Callable[[Call, dict[str, Tensor], Tensor], Any]
STAGES = (0, 1, 2, 3)
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # jvp's own
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


@pytest.mark.sample(27)
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


@pytest.mark.sample(5)
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


@pytest.mark.sample(7)
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
def test_nested_gradients_and_other_reductions(aggregate: str) -> None:
    wanted = reversible_plain(Recomputing, 2)
    for found in comm.simulate(lambda: reversible(Recomputing, T.zero(2, aggregate=aggregate)), world_size=2):
        assert_same(found, wanted)


def test_nested_gradients_and_replicas() -> None:
    def program(*more: fds.Transform) -> dict[str, Tensor]:
        mesh = comm.mesh(replica=2, shard=2)
        return reversible(Recomputing, T.zero(3, mesh["shard"], replicate=mesh["replica"]), *more)

    for found in comm.simulate(program, world_size=4):
        assert_same(found, reversible_plain(Recomputing, 4))
    for found in comm.simulate(program, T.accumulate(2), world_size=4):
        assert_same(found, reversible_plain(Recomputing, 8))


def test_nested_gradients_of_one_rank() -> None:
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
        for leaf, found in zip(leaves.values(), torch.autograd.grad(value, list(leaves.values())), strict=True):
            leaf.data -= 0.1 * found
    for params in comm.simulate(program, world_size=2):
        assert_same(params, leaves)


@pytest.mark.parametrize("stage", [1, 3])
def test_nested_gradients_that_begin_later(stage: int) -> None:
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
    with pytest.raises(RuntimeError, match=r"ran another backward pass.*\['w'\] gradients.*first step"):
        step(state, data())


# -- torch.func --------------------------------------------------------------------------------------------------------


def point(call: Call, params: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda row: call(params, row[None])[0, 0]


def laplace(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Forward over reverse over a batch, as physics-informed losses have it."""
    u = point(call, params)

    def trace(row: Tensor) -> Tensor:
        return torch.stack([jvp(grad(u), (row,), (e,))[1] @ e for e in torch.eye(3)]).sum()

    return (vmap(trace)(x) - x.sum(1)).square().mean() + fit(call, params, x)


def hessians(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    u = point(call, params)
    return vmap(hessian(u))(x).square().mean() + vmap(jacrev(u))(x).square().mean() + fit(call, params, x)


def along(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    value, tangent = jvp(lambda x: call(params, x), (x,), (torch.ones_like(x),))
    return (value * tangent).mean() + fit(call, params, x)


def along_views(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The transform meets no lazy leaf."""
    return along(call, {path: leaf.view_as(leaf) for path, leaf in params.items()}, x)


def rows_alone(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return vmap(point(call, params))(x).square().mean()


def per_sample(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The norms of each row's gradient, penalised."""
    viewed = {path: leaf.view_as(leaf) for path, leaf in params.items()}
    grads = vmap(grad(lambda p, row: point(call, p)(row).square()), in_dims=(None, 0))(viewed, x)
    return torch.stack([each.flatten(1).square().sum(1) for each in grads.values()]).sum(0).mean() + fit(call, params, x)


def per_sample_weights(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The norms of each row's gradient, as weights: the params themselves go into the transform, and nothing comes back."""
    grads = vmap(grad(lambda p, row: point(call, p)(row).square()), in_dims=(None, 0))(params, x)
    norms = torch.stack([each.detach().flatten(1).square().sum(1) for each in grads.values()]).sum(0)
    return (call(params, x)[:, 0].square() / (1 + norms)).mean()


def duals(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """What ``along`` does, without torch.func."""
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(call(params, forward_ad.make_dual(x, torch.ones_like(x))))
        return (value * tangent).mean() + fit(call, params, x)


FUNCTIONAL = (laplace, hessians, along, along_views, duals, rows_alone, per_sample, per_sample_weights)


@pytest.mark.sample(10)
@pytest.mark.parametrize("stage", [None, *STAGES])
@pytest.mark.parametrize("loss", FUNCTIONAL, ids=lambda loss: loss.__name__)
def test_torch_func_in_a_loss(loss: Loss, stage: int | None) -> None:
    if stage is None:
        assert_same(trained(loss), plain(loss, 1))
        return
    for more, k in (((), 1), ((T.accumulate(2),), 2)):
        wanted = plain(loss, 2, k=k)
        for found in comm.simulate(lambda more=more: trained(loss, T.zero(stage), *more), world_size=2):
            assert_same(found, wanted)
    few = comm.simulate(lambda: trained(loss, T.zero(stage, unit_of=by_leaf)), world_size=2)
    assert_same(few[1], plain(loss, 2))


def functional_on_processes() -> list[dict[str, Tensor]]:
    return [trained(loss, T.zero(3)) for loss in (laplace, along)]


def test_torch_func_on_processes() -> None:
    wanted = comm.simulate(functional_on_processes, world_size=2)
    for here, there in zip(wanted, comm.spawn(functional_on_processes, world_size=2), strict=True):
        for one, other in zip(here, there, strict=True):
            assert all(torch.equal(one[path], other[path]) for path in one)


@pytest.mark.parametrize("intra_node", [None, 2])
def test_a_loss_that_meets_torch_func_runs_again(intra_node: int | None) -> None:
    """Once in all, on the rank that met it, whatever the others do; draws, buffers and later steps are those of one run."""

    def program() -> Any:
        here, runs = comm.world(), []
        torch.manual_seed(4)
        module = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        apply, params = fds.functional(module)

        def loss(params: Any, x: Tensor) -> Tensor:
            runs.append(None)
            found = apply(params, x).square().mean() + torch.rand(())
            if here.rank == 1 and len(runs) > 1:  # from the second step on
                found = found + along(lambda p, x: x @ p["3.weight"][:3, :3], params, x) * 0
            return found

        zero = T.zero(3, unit_of=by_leaf, max_live_units=1, intra_node=intra_node, hpz=intra_node is not None)
        step = zero(fds.train_step(loss, fds.sgd(0.1), buffers="own"))
        state = step.init(params)
        step.evaluate(state, torch.ones(4, 3))
        del runs[:]
        losses = []
        for _ in range(4):
            state, metrics = step(state, data().chunk(here.size)[here.rank])
            losses.append(metrics["loss"])
        return len(runs), step.params(state), step.module_buffers(state)["1.num_batches_tracked"]

    found = comm.simulate(program, world_size=4)
    assert [runs for runs, _, _ in found] == [4, 5, 4, 4]
    assert all(count == 4 for _, _, count in found)
    assert all(torch.equal(one[path], found[0][1][path]) for _, one, _ in found for path in one)


@pytest.mark.parametrize("policy", ["recompute", "recompute,matmuls=save"])
def test_torch_func_in_what_a_backward_pass_recomputes(policy: str) -> None:
    """torch takes a jvp under plain recomputation, but units that it meets there cannot be gathered any more."""
    rules = T.remat("", policy=policy)
    if policy == "recompute":
        assert_same(trained(along, rules), plain(along, 1))
        with pytest.raises(RuntimeError, match=r"in what a backward pass recomputes; use zero\(2\)"):
            comm.simulate(lambda: trained(along, rules, T.zero(3)), world_size=2)
    else:
        with pytest.raises(RuntimeError, match=r"a function under remat uses torch.func.*leave the layer out of remat"):
            trained(along, rules)


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_a_copy_of_a_leaf_is_that_of_a_parameter(stage: int | None) -> None:
    def distilled(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
        teacher, same = copy.deepcopy((params, params))
        assert same is teacher
        assert all(leaf.is_leaf and leaf.requires_grad for leaf in teacher.values())
        return (call(params, x) - 0.5 * call({path: leaf.detach() for path, leaf in teacher.items()}, x)).square().mean()

    strategy = () if stage is None else (T.zero(stage, unit_of=by_leaf),)
    for found in comm.simulate(lambda: trained(distilled, *strategy), world_size=1 if stage is None else 2):
        assert_same(found, plain(distilled, 1 if stage is None else 2))


@pytest.mark.parametrize("stage", STAGES)
def test_torch_func_by_the_params_themselves(stage: int) -> None:
    """Their gradients would be lost; with views they are not."""

    def loss(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
        found = grad(lambda params: fit(call, params, x))(params)
        return fit(call, {path: leaf - 0.1 * found[path] for path, leaf in params.items()}, x)

    def viewed(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss(call, {path: leaf.view_as(leaf) for path, leaf in params.items()}, x)

    with pytest.raises(RuntimeError, match=r"a transform of torch.func, where its gradient would be lost; pass p.view_as"):
        comm.simulate(lambda: trained(loss, T.zero(stage)), world_size=2)
    for found in comm.simulate(lambda: trained(viewed, T.zero(stage)), world_size=2):
        assert_same(found, plain(viewed, 2))


# -- what is lost ------------------------------------------------------------------------------------------------------


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_bare_parameter_from_the_second_step_on(stage: int) -> None:
    """The first step's graph is looked through; of later ones the gradients say what went past the view."""
    calls: list[None] = []

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        calls.append(None)
        doubled = Doubled.apply(params["w"]) if len(calls) > 2 else Doubled.apply(params["w"].view_as(params["w"]))
        return (x @ doubled + params["b"]).square().mean()

    step = T.zero(stage)(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init({"w": torch.eye(3), "b": torch.ones(3)})
    for _ in range(2):
        state, _ = step(state, data())
    with pytest.raises(RuntimeError, match=r"the parameter 'w' went straight into a custom autograd.Function.*p.view_as\(p\)"):
        step(state, data())


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_a_loss_without_a_graph(stage: int | None) -> None:
    apply, params = fds.functional(network())

    def without_grad(params: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return apply(params, x).square().mean()

    def inference(params: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return apply(params, x).square().mean()

    def detached(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean().detach()

    def taken_out(params: Any, x: Tensor) -> Any:
        return torch.tensor(apply(params, x).square().mean().item())

    def weighed(params: Any, x: Tensor) -> Any:
        return fds.Weighted(torch.tensor(3.0), torch.tensor(4.0))

    def program(loss: Any, held: Any = params) -> Any:
        step = fds.train_step(loss, fds.sgd(0.1))
        step = step if stage is None else T.zero(stage)(step)
        state, metrics = step(step.init(held), data())
        return step.params(state), metrics["loss"]

    n = 1 if stage is None else 2
    for loss in (without_grad, inference, detached, taken_out, weighed):
        with pytest.raises(RuntimeError, match=r"the loss .* has no graph, so it would train nothing.*no_grad\(\)"):
            comm.simulate(program, loss, world_size=n)
    with pytest.raises(TypeError, match="the loss must be a scalar tensor"):
        comm.simulate(program, lambda params, x: apply(params, x).square().mean().item(), world_size=n)
    for loss in (without_grad, inference, lambda params, x: apply(params, x).square().mean()):  # nothing is to be trained
        frozen = fds.freeze(params, "")
        for found, _ in comm.simulate(program, loss, frozen, world_size=n):
            assert all(torch.equal(found[path], params[path]) for path in found)
    for found, _ in comm.simulate(program, lambda params, x: fds.Weighted(torch.zeros(()), 0), world_size=n):
        assert all(torch.equal(found[path], params[path]) for path in found)


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_a_first_touch_without_gradients(stage: int | None) -> None:
    """A teacher under inference_mode, say, touches the leaves first; the student is trained all the same."""

    def loss(call: Call, params: dict[str, Tensor], x: Tensor) -> Tensor:
        with torch.inference_mode():
            target = call(params, x * 0.5) * 0.9
        return (call(params, x) - target.clone()).square().mean()

    n = 1 if stage is None else 2
    strategy = () if stage is None else (T.zero(stage, **({"max_live_units": 9} if stage == 3 else {})),)
    for found in comm.simulate(lambda: trained(loss, *strategy), world_size=n):
        assert_same(found, plain(loss, n))


BUILT: list["Captured"] = []


class Captured(nn.Module):
    """Reaches the module that it was built as through a global, past the parameters that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        BUILT[:] = [self]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(BUILT[0].inner(x))


@pytest.mark.parametrize("stage", [None, *STAGES])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_forward_that_reaches_the_original_module(stage: int | None, recomputed: bool) -> None:
    apply, params = fds.functional(Captured())

    def loss(params: Any, x: Tensor) -> Tensor:
        if recomputed:
            return fds.remat(lambda x: apply(params, x))(x * 1.0).square().mean()
        return apply(params, x).square().mean()

    step = fds.train_step(loss, fds.sgd(0.1))
    step = step if stage is None else T.zero(stage)(step)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \[3.*that is not one of the step's params"):
        comm.simulate(lambda: step(step.init(params), data()), world_size=1 if stage is None else 2)


class Curved(nn.Module):
    """Differentiates by some of its parameters within a checkpoint; autograd can leave out what the others need."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.first, self.last, self.names = nn.Linear(3, 3), nn.Linear(3, 1), names.split()

    def part(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        by = [self.first.get_parameter(name) for name in self.names]
        found = torch.autograd.grad(y.square().sum(), by, create_graph=True)
        return y * (1 + torch.stack([each.square().sum() for each in found]).sum())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.part, x, use_reentrant=False))


def check_checkpoint(names: str, stage: int | None, n: int, *further: fds.Transform) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), Curved(names))

    def program() -> Any:
        apply, params = fds.functional(module)
        chain = [*further, *([] if stage is None else [T.zero(stage)])]
        step = fds.compose(*chain)(fds.train_step(lambda p, x: fit(apply, p, x), fds.sgd(0.1, momentum=0.9)))
        state, here = step.init(params), comm.world()
        for _ in range(3):
            state, _ = step(state, data().chunk(here.size)[here.rank])
        return step.params(state)

    wanted = copy.deepcopy(module)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for x in data().chunk(n):
            (fit(lambda params, x: wanted(x), {}, x) / n).backward()
        optimizer.step()
    for found in comm.simulate(program, world_size=n):
        assert_same(found, dict(wanted.named_parameters()))


@pytest.mark.parametrize("names", ["bias", "weight", "weight bias"])
@pytest.mark.parametrize("stage", [None, *STAGES])
def test_a_checkpoint_around_a_gradient_by_some_params(names: str, stage: int | None) -> None:
    """What is saved depends on which gradients autograd leaves out, so a recomputation needs leaves of the same node."""
    check_checkpoint(names, stage, 1 if stage is None else 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_within_remat_too(stage: int) -> None:
    check_checkpoint("bias", stage, 2, T.remat("1"))


def test_leaves_of_another_node_in_a_recomputation_break_it() -> None:
    bug = Bug(
        "leaves, not a node",
        "transforms.zero.lazy_params:LazyParams._entered",
        "self._leaves.filled(unit, views, self._node)",
        "self._leaves.filled(unit, views, (lambda _, new: [v.requires_grad_() for v in new]) if self._in_backward "
        "else self._node)",
    )
    with planted(bug), pytest.raises(CheckpointError):
        check_checkpoint("bias", 1, 1)
