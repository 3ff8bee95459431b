"""Gradient noise scale: how many rows a batch is worth as training goes on, and a batch that follows it.

The trace of the gradients' covariance over the squared gradient says which batch size is critical (McCandlish et al. 2018,
arXiv:1812.06162). Both come from two norms: a micro-batch's and the batch's. It rises as the loss falls, and the batch with it.

Law: of one batch the two estimates are those of its micro-batches' gradients in plain PyTorch, on any number of ranks.
"""

from typing import Any

import torch
from shared import first, loss_fn, rows, table, validation

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

NAMES = ("small", "count", "trace", "square")


def noise_scale(decay: float) -> fds.Transform:
    """The metric ``noise`` in micro-batches. After ``zero``, so that it sees all ranks' gradients; before ``accumulate``."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        return inner(step, params).put(noise={name: torch.zeros(()) for name in NAMES})

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        state, own, metrics = inner(step, state, batch, None, True)
        reduced, whole = step.reduce(state, own)  # sums over all ranks
        square = (step.norm(reduced, whole.sum) / step.sum_over_ranks(state, whole.weight)) ** 2
        slot = state.slots["noise"]
        state = state.put(noise={**slot, "small": slot["small"] + square, "count": slot["count"] + 1})
        return state, own if carry is None else fds.tree.map(torch.add, carry, own), metrics

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        slot = state.slots["noise"]
        k, big = slot["count"], (step.norm(state, grads.sum) / grads.weight) ** 2
        small = slot["small"] / k
        trace = torch.lerp((small - big) / (1 - 1 / k), slot["trace"], decay)
        square = torch.lerp((k * big - small) / (k - 1), slot["square"], decay)
        zero = torch.zeros(())
        state = state.put(noise=dict(zip(NAMES, (zero, zero, trace, square), strict=True)))
        state, metrics = inner(step, state, grads)
        return state, {**metrics, "noise": trace / square, "trace": trace, "square": square}

    return fds.wrap("noise_scale", slot="noise", init=init, gradients=gradients, update=fds.outermost(update))


def law() -> None:
    """The two estimates are the formula's, alone and on two ranks."""
    parts = 4

    def program(*strategy: fds.Transform) -> tuple[float, float]:
        step = fds.compose(*strategy, noise_scale(0.0), T.accumulate(parts))(fds.train_step(loss_fn, fds.sgd(0.1)))
        here = comm.world()
        micro = [rows(i, count=16, rank=here.rank, size=here.size) for i in range(parts)]
        batch = tuple(torch.cat([part[place] for part in micro]) for place in (0, 1))
        _, metrics = step(step.init(first()), batch)
        return metrics["trace"].item(), metrics["square"].item()

    leaves = {path: leaf.requires_grad_() for path, leaf in first().items()}
    found = []
    for i in range(parts):
        grads = torch.autograd.grad(loss_fn(leaves, rows(i, count=16)), [*leaves.values()])
        found.append(torch.cat([grad.flatten() for grad in grads]))
    small = torch.stack([grad.square().sum() for grad in found]).mean().item()
    big = torch.stack(found).mean(0).square().sum().item()
    wanted = torch.tensor([(small - big) / (1 - 1 / parts), (parts * big - small) / (parts - 1)])
    for result in (program(), *comm.simulate(program, T.zero(2), world_size=2)):
        torch.testing.assert_close(torch.tensor(result), wanted, rtol=1e-3, atol=1e-6)


def main(steps: int = 120, micro: int = 16) -> str:
    """Losses, noise scales and the numbers of micro-batches that they chose."""
    lines, k, seen = [], 2, 0
    state = None
    for index in range(steps):
        step = fds.compose(noise_scale(0.9), T.accumulate(k))(fds.train_step(loss_fn, fds.adamw(3e-3)))
        state = step.init(first()) if state is None else state
        state, metrics = step(state, rows(index, count=micro * k))
        seen += micro * k
        noise = metrics["noise"].item()
        if index % max(1, steps // 6) == 0 or index == steps - 1:
            lines.append((index, seen, validation(step.params(state)), noise * micro, micro * k))
        k = max(2, min(16, round(noise))) if noise > 0 else k
    return table(["step", "rows so far", "loss", "noise scale in rows", "batch"], lines)


TINY = {"steps": 2}

if __name__ == "__main__":
    law()
    print(main())
