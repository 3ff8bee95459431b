"""Gradient sparsity: which part of each leaf's gradient is zero in a micro-batch, counted in a slot.

Sparse gradients can be sent for fewer bytes (Aji and Heafield 2017, arXiv:1704.05021). Rows of an embedding that a micro-batch
does not use have no gradient. Each element is to be counted once, wherever ZeRO has put it.

Law: the counts are those of the micro-batches' gradients in plain PyTorch, on any number of ranks and in stages 0 to 3.
"""

from typing import Any

import torch
from shared import CONTEXT, first, loss_fn, rows, table
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T


def sparsity() -> fds.Transform:
    """The metric ``zeros/PATH``, the mean over micro-batches. After ``zero`` and before ``accumulate``."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        used = {leaf.path: torch.zeros(()) for leaf in step.leaf_map(state).leaves}
        return state.put(sparsity={"used": used, "micro": torch.zeros(())})

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        state, own, metrics = inner(step, state, batch, None, True)
        reduced, whole = step.reduce(state, own)  # sums over all ranks
        found = step.per_leaf(reduced, lambda part: (part != 0).sum(), whole.sum)
        slot = state.slots["sparsity"]
        used = {path: old + found[path] for path, old in slot["used"].items()}
        state = state.put(sparsity={"used": used, "micro": slot["micro"] + 1})
        return state, own if carry is None else fds.tree.map(torch.add, carry, own), metrics

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        slot, leaves = state.slots["sparsity"], step.leaf_map(state).leaves
        state, metrics = inner(step, state, grads)
        zeros = {f"zeros/{leaf.path}": 1 - slot["used"][leaf.path] / slot["micro"] / leaf.numel for leaf in leaves}
        return state, {**metrics, **zeros}

    return fds.wrap("sparsity", slot="sparsity", init=init, gradients=gradients, update=update)


def law() -> None:
    """The counts are the formula's, alone and on two ranks, in each stage."""
    parts = 4

    def program(*strategy: fds.Transform) -> dict[str, Tensor]:
        step = fds.compose(*strategy, sparsity(), T.accumulate(parts))(fds.train_step(loss_fn, fds.sgd(0.1)))
        micro = [rows(i, count=16) for i in range(parts)]
        state, _ = step(step.init(first()), tuple(torch.cat([part[place] for part in micro]) for place in (0, 1)))
        return state.slots["sparsity"]["used"]  # type: ignore[no-any-return]

    wanted = {path: torch.zeros(()) for path in first()}
    for i in range(parts):
        leaves = {path: leaf.requires_grad_() for path, leaf in first().items()}
        grads = torch.autograd.grad(loss_fn(leaves, rows(i, count=16, rank=0, size=1)), [*leaves.values()])
        wanted = {path: wanted[path] + (grad != 0).sum() for path, grad in zip(leaves, grads, strict=True)}
    assert program() == wanted
    for stage in range(4):
        assert all(found == wanted for found in comm.simulate(program, T.zero(stage), world_size=2))


def main(steps: int = 20, sizes: tuple[int, ...] = (4, 16, 64)) -> str:
    """The part of zeros in the gradient of the embedding, by the rows of a micro-batch."""
    lines = []
    for size in sizes:
        step = fds.compose(sparsity(), T.accumulate(64 // size))(fds.train_step(loss_fn, fds.adamw(3e-3)))
        state = step.init(first())
        for index in range(steps):
            state, metrics = step(state, rows(index, count=64))
        zeros = {path: metrics[f"zeros/{path}"].item() for path in first()}
        lines.append((size, size * CONTEXT, *(f"{100 * zeros[path]:.1f} %" for path in ("embed", "hidden", "head"))))
    return table(["rows of a micro-batch", "bytes read", "zeros in embed", "in hidden", "in head"], lines)


TINY = {"steps": 1, "sizes": (16,)}

if __name__ == "__main__":
    law()
    print(main())
