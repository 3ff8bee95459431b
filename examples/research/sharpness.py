"""Sharpness-aware minimisation: SAM finds flatter minima than SGD, measured by the Hessian's largest eigenvalue.

SAM (Foret et al. 2021, arXiv:2010.01412) takes the gradient at the params moved by rho along their own gradient. It is one
phase, and knows nothing of the shards of ZeRO.

Law: with rho = 0 it is SGD; in ZeRO-3 on two ranks it is SAM on one device.
"""

from typing import Any

import torch
from shared import first, hessian_times, loss_fn, rows, table, train

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T


def sam(rho: float) -> fds.Transform:
    """Put ``accumulate`` before it, so that it sees the whole batch."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        after, first, metrics = inner(step, state, batch, None, True)
        reduced, first = step.reduce(after, first)  # sums over all ranks
        length = rho / step.norm(reduced, first.sum)
        pairs = zip(step.trained(state), first.sum, strict=True)
        there = step.with_trained(state, [leaf + length * grad.view_as(leaf) for leaf, grad in pairs])
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


def law() -> None:
    """SAM by zero is SGD, and ZeRO changes nothing."""

    def program(*strategy: fds.Transform) -> Any:
        return train(*strategy, optimizer=fds.sgd(0.3), steps=2)[0]

    torch.testing.assert_close(program(sam(0.0)), program(), rtol=1e-5, atol=1e-6)
    for params in comm.simulate(program, T.zero(3), sam(0.1), world_size=2):
        torch.testing.assert_close(params, program(sam(0.1)), rtol=1e-4, atol=1e-5)


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
