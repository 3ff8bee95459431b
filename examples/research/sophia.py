"""Sophia: Newton steps that are clipped element by element, with the Hessian's diagonal from a product every few updates.

Sophia-H (Liu et al. 2023, arXiv:2305.14342) divides the momentum by an estimate of the Hessian's diagonal, v * H v for
random signs v, and clips each element's step to 1. ``fds.hvp`` gives H v in any stage of ZeRO.

Law: alone and in stages 0 to 3 it is a plain loop of PyTorch.
"""

from typing import Any

import torch
from shared import assert_everywhere, first, loss_fn, rows, table, train, validation
from torch import Tensor

import functional_ds as fds

BETAS = (0.9, 0.95)


def signs(step: int, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Random signs by path, equal on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return {path: torch.randint(0, 2, shapes[path], generator=generator) * 2.0 - 1 for path in sorted(shapes)}


def sophia(every: int, gamma: float = 0.05, eps: float = 1e-12) -> fds.Transform:
    """Replaces the gradient by a clipped Newton step, for ``fds.sgd``. Put it after ``accumulate``, to see the whole batch."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        return state.put(
            sophia={name: [torch.zeros_like(leaf) for leaf in step.trained(state)] for name in ("mean", "diagonal")}
        )

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        after, grads, metrics = inner(step, state, batch, carry, last)
        if int(state.step) % every:
            return after, grads, metrics
        v = step.placed(state, signs(int(state.step), {leaf.path: leaf.shape for leaf in step.leaf_map(state).leaves}))
        product = fds.hvp(step, state, batch, v, inner=inner)
        each = zip(state.slots["sophia"]["diagonal"], v, product, strict=True)
        diagonal = [old.lerp(x * hx, 1 - BETAS[1]) for old, x, hx in each]
        return after.put(sophia={**after.slots["sophia"], "diagonal": diagonal}), grads, metrics

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        slot = state.slots["sophia"]
        each = zip(slot["mean"], grads.sum, strict=True)
        mean = [old.lerp(g.to(old.dtype).view_as(old) / grads.weight, 1 - BETAS[0]) for old, g in each]
        pairs = zip(mean, slot["diagonal"], strict=True)
        moves = [(m / (gamma * h).clamp(min=eps)).clamp(-1, 1) for m, h in pairs]
        state = state.put(sophia={**slot, "mean": mean})
        return inner(step, state, fds.Weighted(moves, torch.ones_like(grads.weight)))

    return fds.wrap(f"sophia({every})", slot="sophia", init=init, gradients=gradients, update=fds.innermost(update))


def oracle(steps: int, lr: float, every: int, gamma: float, eps: float) -> dict[str, Tensor]:
    """The params after some updates."""
    params = first()
    mean, diagonal = ({path: torch.zeros_like(leaf) for path, leaf in params.items()} for _ in range(2))
    for index in range(steps):
        leaves = {path: leaf.requires_grad_() for path, leaf in params.items()}
        loss = loss_fn(leaves, rows(index, rank=0, size=1))
        grads = dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()], create_graph=True), strict=True))
        if index % every == 0:
            v = signs(index, {path: leaf.shape for path, leaf in params.items()})
            along = torch.stack([(grads[path] * v[path]).sum() for path in v]).sum()
            product = dict(zip(leaves, torch.autograd.grad(along, [*leaves.values()]), strict=True))
            diagonal = {path: BETAS[1] * old + (1 - BETAS[1]) * v[path] * product[path] for path, old in diagonal.items()}
        mean = {path: BETAS[0] * old + (1 - BETAS[0]) * grads[path].detach() for path, old in mean.items()}
        moves = {path: (mean[path] / (gamma * diagonal[path]).clamp(min=eps)).clamp(-1, 1) for path in mean}
        params = {path: leaf.detach() - lr * moves[path] for path, leaf in params.items()}
    return params


def law() -> None:
    """It is its formula in any stage."""

    def program(*strategy: fds.Transform) -> Any:
        return train(*strategy, sophia(2, 0.5, 1e-2), optimizer=fds.sgd(1e-2), steps=3)[0]

    wanted = {
        path: leaf.detach() for path, leaf in oracle(3, 1e-2, 2, 0.5, 1e-2).items()
    }  # with this eps rounding turns no step
    assert_everywhere(program, wanted, rtol=1e-4, atol=1e-5)


def main(steps: int = 100, every: int = 10) -> str:
    """The loss of AdamW and of Sophia at several learning rates."""
    lines = []
    for lr in (1e-3, 3e-3, 1e-2):
        adam, _ = train(optimizer=fds.adamw(lr), steps=steps)
        newton, _ = train(sophia(every), optimizer=fds.sgd(lr), steps=steps)
        lines.append((lr, validation(adam), validation(newton)))
    return table(["learning rate", "AdamW", f"Sophia, H v every {every}"], lines)


TINY = {"steps": 2}

if __name__ == "__main__":
    law()
    print(main())
