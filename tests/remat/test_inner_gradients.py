"""Remat around functions that differentiate inside, and reports of inputs that stay."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

POLICIES = (
    "recompute",
    "recompute,matmuls=save",
    "recompute,matmuls=offload",
    "recompute,a=save",
    "recompute,a=offload",
    "recompute,a=save,matmuls=save",
    "recompute,inputs=offload,matmuls=save",
    "save",
    "offload",
    "save,matmuls=offload",
)


def critic(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """A penalty on the norm of the gradient by the inputs, with products before, inside and after that gradient."""
    x = x.detach().requires_grad_()
    a = fds.checkpoint_name(x @ w, "a").tanh()
    y = (a @ v).tanh()
    (g,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    z = torch.tanh((g @ w) * y)
    return (z @ v).sin().sum() + (g.norm(dim=1) - 1).square().sum()


def weights() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w, v, x = (torch.randn(n, 4, generator=generator) for n in (4, 4, 3))
    return w.requires_grad_(), v.requires_grad_(), x


@pytest.mark.law(28)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_gradient_inside(policy: str) -> None:
    """Law 28 for gradient penalties: the values that are kept stand for the same operations in every run."""
    w, v, x = weights()
    expected = torch.autograd.grad(critic(w, v, x), (w, v))
    rematted = fds.remat(critic, policy=policy)
    for _ in range(2):
        assert all(map(torch.equal, torch.autograd.grad(rematted(w, v, x), (w, v)), expected))
    around = fds.remat(lambda *given: fds.remat(critic, policy=policy)(*given) * 1, policy="recompute,matmuls=save")
    if "a=" not in policy:
        assert all(map(torch.equal, torch.autograd.grad(around(w, v, x), (w, v)), expected))


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if "a=" not in policy])
def test_a_rematted_block_inside_of_a_gradient(policy: str) -> None:
    """The block is rematted, and the gradient through it is taken by a function that is rematted, too."""
    w, v, x = weights()

    def outer(block: Any, w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        x = (x @ v).tanh().detach().requires_grad_()
        y = block(x)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return (g @ v).square().sum() + (y @ v).sum()

    plain = torch.autograd.grad(outer(lambda x: ((x @ w).sin() @ v).cos(), w, v, x), (w, v))
    block = fds.remat(lambda x: ((x @ w).sin() @ v).cos(), policy=policy)
    for others in ("recompute", "recompute,matmuls=save", "offload"):
        found = fds.remat(lambda w, v, x: outer(block, w, v, x), policy=others)(w, v, x)
        assert all(map(torch.equal, torch.autograd.grad(found, (w, v)), plain))


@pytest.mark.parametrize("stage", [1, 3])
def test_in_a_step(stage: int) -> None:
    """The same with modules and draws of dropout, under ZeRO, against the step without remat."""
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)))

    def penalty(p: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(apply(p, x).sum(), x, create_graph=True)
        return (g.norm(dim=1) - 1).square().mean() + apply(p, x).mean()

    def program(loss: Any, *transforms: Any) -> dict[str, Tensor]:
        torch.manual_seed(1)
        step = fds.compose(*transforms)(fds.train_step(loss, fds.adamw(0.1)))
        state = step.init(params)
        for i in range(2):
            state, _ = step(state, torch.randn(4, 4, generator=torch.Generator().manual_seed(i)))
        return dict(fds.tree.named(step.params(state)))

    expected = comm.simulate(program, penalty, T.zero(stage), world_size=2)
    kept = fds.remat(penalty, policy="recompute,matmuls=save")
    for found, other in zip(comm.simulate(program, kept, T.zero(stage), world_size=2), expected, strict=True):
        for path, leaf in other.items():
            torch.testing.assert_close(found[path], leaf, msg=path)


@pytest.mark.parametrize("policy", ["recompute,inputs=offload", "offload", "save,inputs=offload"])
def test_a_report_has_inputs_that_stay(policy: str) -> None:
    """An input that requires no grad stays where it is; the report counts it, as autograd alone would hold it."""
    w, _, x = weights()
    with fds.remat_report() as report:
        y = fds.remat(lambda x: (x @ w).tanh(), policy=policy)(x)
    assert [(row.keep.value, row.whole) for row in report.rows if row.what == "inputs"] == [("save", x.nbytes)]
    assert y.requires_grad


@pytest.mark.parametrize("policy", POLICIES[:3] + POLICIES[-3:])
def test_sparse_inputs(policy: str) -> None:
    """A sparse input stays where it is, whatever the policy, with a report or without."""
    w, _, x = weights()
    (expected,) = torch.autograd.grad((x @ w).sum(), w)
    for report in (False, True):
        function = fds.remat(lambda x: x @ w, policy=policy)
        if report:
            with fds.remat_report():
                y = function(x.to_sparse())
        else:
            y = function(x.to_sparse())
        torch.testing.assert_close(torch.autograd.grad(y.sum(), w)[0], expected)


class FastWeights(nn.Module):
    """A second pass with params that a step of its own has changed, by ``functional_call`` (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        params = dict(self.net.named_parameters())
        grads = torch.autograd.grad(self.net(x).square().mean(), list(params.values()), create_graph=True)
        fast = {name: p - 0.5 * grad for (name, p), grad in zip(params.items(), grads, strict=True)}
        return torch.func.functional_call(self.net, fast, x).square().mean()


@pytest.mark.parametrize("policy", ["recompute", "recompute,matmuls=save", "recompute,inputs=offload", "offload"])
@pytest.mark.parametrize("blocks", [None, "net", ""])
def test_params_that_stand_in_for_a_call(blocks: str | None, policy: str) -> None:
    """A block that ran with other params runs again with those."""
    torch.manual_seed(1)
    module, x = FastWeights(), torch.randn(5, 2)
    module(x).backward()
    apply, params = fds.functional(module)
    step = T.remat(blocks, policy=policy)(fds.train_step(apply, fds.sgd(1.0)))
    state, _ = step(step.init(params), x)
    for name, p in module.named_parameters():
        torch.testing.assert_close(step.params(state)[name], (p - p.grad).detach())
