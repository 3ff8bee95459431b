"""Sharpness-aware minimisation: SAM finds flatter minima than SGD, measured by the Hessian's largest eigenvalue.

SAM (Foret et al. 2021, arXiv:2010.01412) takes the gradient at the params moved by rho along their own gradient. ASAM (Kwon et
al. 2021, arXiv:2102.11600) measures the move of each param by its size. It is one phase, and knows nothing of the shards of
ZeRO.

Law: with rho = 0 it is SGD; SAM and ASAM in ZeRO-3 on two ranks are those of plain PyTorch.
"""

from typing import Any

import torch
from shared import first, hessian_times, loss_fn, rows, table, train

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T


def sam(rho: float, *, adaptive: bool = False) -> fds.Transform:
    """SAM, or ASAM if ``adaptive``. Put ``accumulate`` before it, so that it sees the whole batch."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        after, first, metrics = inner(step, state, batch, None, True)
        reduced, first = step.reduce(after, first)  # sums over all ranks
        leaves = step.trained(state)
        sizes = [leaf.abs() + 0.01 if adaptive else torch.ones_like(leaf) for leaf in leaves]
        slopes = [size * grad.view_as(size) for size, grad in zip(sizes, first.sum, strict=True)]
        length = rho / step.norm(reduced, slopes)
        moved = [leaf + length * size * slope for leaf, size, slope in zip(leaves, sizes, slopes, strict=True)]
        there = step.with_trained(state, moved)
        _, second, _ = inner(step, there, batch, carry, last)
        return after, second, metrics

    return fds.wrap(f"sam({rho})", gradients=gradients)


def sharpness(params: Any, rounds: int) -> float:
    """The largest eigenvalue of the Hessian on one batch, by power iteration."""
    step = fds.train_step(loss_fn, fds.sgd(0.0))
    state, batch = step.init(params), rows(10**6, count=256)
    vector = first(1)
    size = torch.zeros(())
    for _ in range(rounds):
        norm = torch.stack([x.norm() for x in vector.values()]).norm()
        vector = {path: x / norm for path, x in vector.items()}
        product = hessian_times(step, state, batch, vector)
        size = torch.stack([(product[path] * x).sum() for path, x in vector.items()]).sum()
        vector = product
    return size.item()


def oracle(steps: int, lr: float, rho: float, *, adaptive: bool) -> Any:
    """The params after some updates."""

    def slopes(params: Any, batch: Any) -> Any:
        leaves = {path: leaf.detach().requires_grad_() for path, leaf in params.items()}
        return dict(zip(leaves, torch.autograd.grad(loss_fn(leaves, batch), [*leaves.values()]), strict=True))

    params = first()
    for index in range(steps):
        batch = rows(index, rank=0, size=1)
        sizes = {path: leaf.abs() + 0.01 if adaptive else torch.ones(()) for path, leaf in params.items()}
        scaled = {path: sizes[path] * grad for path, grad in slopes(params, batch).items()}
        norm = torch.cat([grad.flatten() for grad in scaled.values()]).norm()
        there = {path: leaf + rho / norm * sizes[path] * scaled[path] for path, leaf in params.items()}
        params = {path: params[path] - lr * grad for path, grad in slopes(there, batch).items()}
    return params


def law() -> None:
    """SAM by zero is SGD, and ZeRO changes nothing."""

    def program(*strategy: fds.Transform) -> Any:
        return train(*strategy, optimizer=fds.sgd(0.3), steps=2)[0]

    torch.testing.assert_close(program(sam(0.0)), program(), rtol=1e-5, atol=1e-6)
    for adaptive in (False, True):
        wanted = oracle(2, 0.3, 0.1, adaptive=adaptive)
        for params in comm.simulate(program, T.zero(3), sam(0.1, adaptive=adaptive), world_size=2):
            torch.testing.assert_close(params, wanted, rtol=1e-4, atol=1e-5)


def main(steps: int = 200, rounds: int = 12) -> str:
    """Training loss and sharpness for several rho."""
    lines = []
    for rho in (0.0, 0.05, 0.2):
        params, _ = train(sam(rho), optimizer=fds.sgd(0.3, momentum=0.9), steps=steps)
        with torch.no_grad():
            loss = loss_fn(params, rows(10**6, count=256)).item()
        lines.append((rho, loss, sharpness(params, rounds)))
    return table(["rho", "loss", "sharpness"], lines)


TINY = {"steps": 2, "rounds": 2}

if __name__ == "__main__":
    law()
    print(main())
