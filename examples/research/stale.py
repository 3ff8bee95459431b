"""Stale gradients: each update uses the gradient of some updates before.

So do asynchronous workers and pipelines without a flush (Langford et al. 2009, arXiv:0911.0491). The delay limits the learning
rate. Gradients wait in a slot, in shards under ZeRO, and are saved and resharded with the params.

Law: alone and in stages 0 to 3 it is a plain loop of PyTorch, whose first updates use a gradient of zero.
"""

from typing import Any

import torch
from shared import assert_everywhere, first, loss_fn, rows, table, train, validation
from torch import Tensor

import functional_ds as fds


def stale(delay: int) -> fds.Transform:
    """The gradient of ``delay`` updates before."""
    ages = [f"{age + 1} ago" for age in range(delay)]

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        return state.put(stale={age: [torch.zeros_like(leaf) for leaf in step.trained(state)] for age in ages})

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        old = [state.slots["stale"][age] for age in ages]
        mean = [grad.to(x.dtype).view_as(x) / grads.weight for grad, x in zip(grads.sum, old[-1], strict=True)]
        state = state.put(stale=dict(zip(ages, [mean, *old], strict=False)))
        return inner(step, state, fds.Weighted([x.clone() for x in old[-1]], torch.ones_like(grads.weight)))

    return fds.wrap(f"stale({delay})", slot="stale", init=init, update=fds.innermost(update))


def oracle(steps: int, lr: float, delay: int) -> dict[str, Tensor]:
    """The params after some updates."""
    params = first()
    queue = [{path: torch.zeros_like(leaf) for path, leaf in params.items()} for _ in range(delay)]
    for index in range(steps):
        leaves = {path: leaf.requires_grad_() for path, leaf in params.items()}
        loss = loss_fn(leaves, rows(index, rank=0, size=1))
        queue.append(dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True)))
        late = queue.pop(0)
        params = {path: leaf.detach() - lr * late[path] for path, leaf in leaves.items()}
    return params


def law() -> None:
    """It is its formula in any stage."""

    def program(*strategy: fds.Transform) -> Any:
        return train(*strategy, stale(2), optimizer=fds.sgd(0.3), steps=5)[0]

    assert_everywhere(program, oracle(5, 0.3, 2), rtol=1e-4, atol=1e-5)


def main(steps: int = 100, delays: tuple[int, ...] = (1, 4, 16), rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)) -> str:
    """The loss by delay and learning rate."""
    lines = []
    for delay in (0, *delays):
        strategy = [stale(delay)] if delay else []
        found = [train(*strategy, optimizer=fds.sgd(rate, momentum=0.9), steps=steps)[0] for rate in rates]
        lines.append((delay, *map(validation, found)))
    return table(["updates late", *(f"rate {rate:g}" for rate in rates)], lines)


TINY = {"steps": 3, "delays": (1,), "rates": (0.1,)}

if __name__ == "__main__":
    law()
    print(main())
