"""Ensembles by vmap: several models of other seeds in one step, each clipped by its own norm.

Deep ensembles (Lakshminarayanan et al. 2017, arXiv:1612.01474) average the predictions of models that differ in their first
params. Here a leaf has all members' params, and ``vmap`` runs the loss. ``T.clip`` would clip by the norm of all members.

Law: in stages 0 to 3 each member is the model trained alone, clipped in plain PyTorch.
"""

from collections.abc import Callable
from typing import Any

import torch
from shared import Batch, assert_everywhere, first, logits, loss_fn, rows, table, validation
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T


def of_members(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The sum of the members' losses; params have the members in dim 0."""

    def total(params: Any, batch: Any) -> Tensor:
        viewed = fds.tree.map(lambda leaf: leaf.view_as(leaf), params)
        return torch.func.vmap(loss, in_dims=(0, None))(viewed, batch).sum()

    return total


def clip_members(count: int, limit: float) -> fds.Transform:
    """Clips each member's gradient to a length."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        places = step.leaf_map(state)
        members = [torch.zeros(grad.numel(), dtype=torch.long) for grad in grads.sum]  # whose each element is
        for shard in places.shards:
            size = places.leaves[shard.leaf].numel // count
            indices = torch.arange(shard.offset, shard.offset + shard.numel)
            members[shard.tensor][shard.start : shard.start + shard.numel] = indices // size
        pairs = [*zip(grads.sum, members, strict=True)]
        own = [[grad * (who == member).view_as(grad) for grad, who in pairs] for member in range(count)]
        norms = torch.stack([step.norm(state, tensors) for tensors in own]) / grads.weight
        scale = (limit / norms).clamp(max=1.0)
        return inner(step, state, fds.Weighted([grad * scale[who].view_as(grad) for grad, who in pairs], grads.weight))

    return fds.wrap(f"clip_members({limit})", update=update)


def stacked(count: int) -> dict[str, Tensor]:
    """The first params of all members."""
    return {path: torch.stack([first(seed)[path] for seed in range(count)]) for path in first()}


def trained(*strategy: fds.Transform, count: int, optimizer: Any, steps: int) -> dict[str, Tensor]:
    """All members' params."""
    step = fds.compose(*strategy)(fds.train_step(of_members(loss_fn), optimizer))
    state = step.init(stacked(count))
    for index in range(steps):
        state, _ = step(state, rows(index))
    return step.params(state)  # type: ignore[no-any-return]


def alone(seed: int, rate: float, steps: int, limit: float) -> dict[str, Tensor]:
    """One member in plain PyTorch."""
    params = first(seed)
    for index in range(steps):
        leaves = {path: leaf.detach().requires_grad_() for path, leaf in params.items()}
        grads = torch.autograd.grad(loss_fn(leaves, rows(index, rank=0, size=1)), [*leaves.values()])
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        scale = (limit / norm).clamp(max=1.0)
        params = {path: leaf.detach() - rate * scale * grad for (path, leaf), grad in zip(leaves.items(), grads, strict=True)}
    return params


def law() -> None:
    """Members are models that are trained alone."""

    def program(*strategy: fds.Transform) -> Any:
        return trained(*strategy, clip_members(3, 0.5), count=3, optimizer=fds.sgd(0.5), steps=3)

    members = [alone(seed, 0.5, 3, 0.5) for seed in range(3)]
    assert_everywhere(program, {path: torch.stack([own[path] for own in members]) for path in first()}, rtol=1e-4, atol=1e-5)


def together(params: Any, batch: Batch) -> float:
    """The loss of the mean of the members' predictions."""
    with torch.no_grad():
        found = torch.func.vmap(logits, in_dims=(0, None))(params, batch[0]).softmax(-1).mean(0)
        return torch.nn.functional.nll_loss(found.log(), batch[1]).item()


def main(steps: int = 100, counts: tuple[int, ...] = (1, 4, 16), ranks: int = 2) -> str:
    """The validation losses of a member, and of the ensemble."""
    held_out, lines = rows(0, split="validation", count=512, rank=0, size=1), []
    for count in counts:

        def program(count: int = count) -> Any:
            return trained(T.zero(3), clip_members(count, 1.0), count=count, optimizer=fds.adamw(1e-2), steps=steps)

        params = comm.simulate(program, world_size=ranks)[0]
        member = sum(validation({path: leaf[i] for path, leaf in params.items()}) for i in range(count)) / count
        lines.append((count, member, together(params, held_out)))
    return table(["members", "loss of a member", "of the ensemble"], lines)


TINY = {"steps": 2, "counts": (2,)}

if __name__ == "__main__":
    law()
    print(main())
