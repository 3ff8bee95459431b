"""Losses that have derivatives in them: physics, penalties, meta-learning, functions with backwards of their own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from .program import Program, regression, rows_of


def mlp(inputs: int, outputs: int, width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))


class Heat(nn.Module):
    """A residual with first and second derivatives by the inputs, by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.net(x)
        du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        dxx = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)[0][:, 0]
        return ((du[:, 1] - dxx) ** 2).mean() + (u**2).mean()


class Poisson(nn.Module):
    """A Laplacian by torch.func's Hessian, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        laplacian = vmap(lambda row: hessian(lambda z: self.net(z).squeeze(-1))(row).diagonal().sum())(x)
        return ((laplacian - x.sum(1)) ** 2).mean()


class Directional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        value, slope = jvp(self.net, (x,), (torch.ones_like(x),))
        return ((slope + value) ** 2).mean()


class Contractive(nn.Module):
    """An auto-encoder whose encoder's Jacobian is small."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(4, 2), mlp(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.decode(self.encode(x)), x) + 0.1 * (vmap(jacrev(self.encode))(x) ** 2).sum((1, 2)).mean()


class Critic(nn.Module):
    """A Wasserstein critic with a gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        real, fake = batch
        between = ((real + fake) / 2).requires_grad_()
        slope = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)[0]
        return self.net(fake).mean() - self.net(real).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()


class Maml(nn.Module):
    """Each row is a task: one inner step on a part of it, the loss on the other."""

    def __init__(self, first_order: bool = False) -> None:
        super().__init__()
        self.net, self.first_order = mlp(1, 1), first_order

    def forward(self, batch: Tensor) -> Tensor:
        losses = []
        for task in batch:
            x, y = task[:, :1], task[:, 1:]
            params = dict(self.net.named_parameters())
            inner = F.mse_loss(self.net(x[:2]), y[:2])
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=not self.first_order)
            fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
            losses.append(F.mse_loss(functional_call(self.net, fast, x[2:]), y[2:]))
        return torch.stack(losses).mean()


class Sharpness(nn.Module):
    """The loss at the params that one row's ascent reaches, for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 2)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = []
        for x, y in zip(*batch, strict=True):
            params = dict(self.net.named_parameters())
            grads = torch.autograd.grad(F.mse_loss(self.net(x), y), list(params.values()))
            there = {name: p + 0.05 * g for (name, p), g in zip(params.items(), grads, strict=True)}
            losses.append(F.mse_loss(functional_call(self.net, there, x), y))
        return torch.stack(losses).mean()


class Hyper(nn.Module):
    """A network that makes another one's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.code = nn.Linear(3, 8), nn.Parameter(torch.randn(3))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        made = self.make(self.code)
        return F.mse_loss(F.linear(x, made[:6].view(2, 3), made[6:]), y)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight.T, 2 * x.T @ grad


class Custom(nn.Module):
    """A function with a backward of its own, that is given a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 2)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.out(Twice.apply(batch[0], self.weight)), batch[1])


class Recomputed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inp, self.block, self.out, self.use_reentrant = nn.Linear(3, 6), mlp(6, 6), nn.Linear(6, 2), use_reentrant

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = checkpoint(self.block, self.inp(batch[0]), use_reentrant=self.use_reentrant)
        return F.mse_loss(self.out(x), batch[1])


class NeuralODE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field, self.out = mlp(3, 3), nn.Linear(3, 2)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0]
        for _ in range(4):
            k = self.field(x)
            x = x + 0.25 * self.field(x + 0.125 * k)
        return F.mse_loss(self.out(x), batch[1])


class Energy(nn.Module):
    """Forces are slopes of an energy; both are fitted."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].detach().clone().requires_grad_()
        energy = self.net(x)
        force = -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
        return F.mse_loss(force[:, :2], batch[1]) + (energy**2).mean()


# torch has no torch.func under hooks on what autograd saves, as its checkpoint and kept outputs have them. The last is its own
# error for jvp in what is recomputed.
UNDER_REMAT = "under remat uses torch.func|in what a backward pass recomputes|: A different number of tensors was saved"

PROGRAMS = {
    "heat equation": Program(Heat, rows_of(2)),
    "Poisson, by torch.func": Program(Poisson, rows_of(2), refused=UNDER_REMAT),
    "directional derivative": Program(Directional, rows_of(2), refused=UNDER_REMAT),
    "contractive auto-encoder": Program(Contractive, rows_of(4), refused=UNDER_REMAT),
    "gradient penalty": Program(Critic, lambda rows, seed: (rows_of(3)(rows, seed), rows_of(3)(rows, seed + 500))),
    "MAML": Program(Maml, rows_of(4, 2)),
    "MAML, first order": Program(lambda: Maml(first_order=True), rows_of(4, 2)),
    "sharpness": Program(Sharpness, regression(3, 2)),
    "hypernetwork": Program(Hyper, regression(3, 2)),
    "a backward of its own": Program(
        Custom, regression(3, 2), refused="'weight' went straight into a custom autograd.Function"
    ),
    "torch's checkpoint": Program(lambda: Recomputed(use_reentrant=False), regression(3, 2)),
    "torch's reentrant checkpoint": Program(
        lambda: Recomputed(use_reentrant=True), regression(3, 2), refused="use_reentrant=True"
    ),
    "neural ODE": Program(NeuralODE, regression(3, 2)),
    "energies and forces": Program(Energy, regression(3, 2)),
}
