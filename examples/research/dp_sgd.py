"""DP-SGD: training with differential privacy, with each row's gradient clipped by ``vmap`` and noise from the step's key.

Each row's gradient is clipped to a length before they are summed, and the sum gets Gaussian noise of that length times a
multiplier (Abadi et al. 2016, arXiv:1607.00133). So the effect of a row is bounded, and hidden by the noise. Noise is a
hash of the seed, the step and the leaf's path: the same on any number of ranks and in any stage.

Law: alone and in stages 0 to 3 it is a loop over rows in plain PyTorch; a row that is added changes a sum by at most the
length.
"""

from typing import Any

import torch
from shared import assert_everywhere, first, loss_fn, rows, table, train, validation
from torch import Tensor

import functional_ds as fds


def normal(key: fds.Key, shape: torch.Size, path: str) -> Tensor:
    """Gaussian noise of a leaf: the inverse of the normal distribution, at uniform numbers."""
    return torch.special.ndtri(key.uniform(torch.empty(shape), path).clamp(min=2.0**-25))


def dp_sgd(length: float, noise: float) -> fds.Transform:
    """Put it after ``zero`` and before ``accumulate``."""

    def loss(inner: Any, step: fds.Step, state: fds.State, params: Any, batch: Any) -> Any:
        viewed = {path: leaf.view_as(leaf) for path, leaf in params.items()}

        def of_row(params: Any, row: Any) -> Tensor:
            found, _ = inner(step, state, params, fds.tree.map(lambda x: x[None], row))
            return found.sum / found.weight  # type: ignore[no-any-return]

        grads, losses = torch.func.vmap(torch.func.grad_and_value(of_row), in_dims=(None, 0))(viewed, batch)
        norms = torch.stack([grad.flatten(1).square().sum(1) for grad in grads.values()]).sum(0).sqrt()
        scale = (length / norms).clamp(max=1.0)
        sums = {path: torch.einsum("r,r...->...", scale, grad).detach() for path, grad in grads.items()}
        linear = torch.stack([(sums[path] * leaf).sum() for path, leaf in viewed.items()]).sum()  # its gradient is the sums
        return fds.Weighted(linear - linear.detach() + losses.sum().detach(), torch.tensor(float(len(norms)))), {}

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        key = state.key.at(step=state.step)
        drawn = step.placed(state, {leaf.path: normal(key, leaf.shape, leaf.path) for leaf in step.leaf_map(state).leaves})
        noisy = [grad + noise * length * z.view_as(grad) for grad, z in zip(grads.sum, drawn, strict=True)]
        return inner(step, state, fds.Weighted(noisy, grads.weight))

    return fds.wrap(f"dp_sgd({length}, {noise})", loss=loss, update=fds.innermost(update))


def clipped(params: dict[str, Tensor], row: Any, length: float) -> dict[str, Tensor]:
    """One row's gradient."""
    leaves = {path: leaf.detach().requires_grad_() for path, leaf in params.items()}
    grads = torch.autograd.grad(loss_fn(leaves, row), [*leaves.values()])
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    return {path: grad * (length / norm).clamp(max=1.0) for path, grad in zip(leaves, grads, strict=True)}


def oracle(steps: int, lr: float, length: float, noise: float) -> dict[str, Tensor]:
    """The params after some updates, row by row."""
    params = first()
    for index in range(steps):
        tokens, targets = rows(index, rank=0, size=1)
        key = fds.Key.of(0).at(step=torch.tensor(index))
        total = {path: noise * length * normal(key, leaf.shape, path) for path, leaf in params.items()}
        for i in range(len(tokens)):
            own = clipped(params, (tokens[i : i + 1], targets[i : i + 1]), length)
            total = {path: grad + own[path] for path, grad in total.items()}
        params = {path: leaf - lr * total[path] / len(tokens) for path, leaf in params.items()}
    return params


def law() -> None:
    """It is its formula in any stage; rows are clipped one by one."""

    def program(*strategy: fds.Transform) -> Any:
        return train(*strategy, dp_sgd(0.1, 0.5), optimizer=fds.sgd(1.0), steps=3)[0]

    assert_everywhere(program, oracle(3, 1.0, 0.1, 0.5), rtol=1e-4, atol=1e-5)

    def total(count: int) -> Tensor:
        """The sum of the first rows' clipped gradients, from one step with a rate of 1 without noise."""
        tokens, targets = rows(0, rank=0, size=1)
        params, _ = train(dp_sgd(0.1, 0.0), optimizer=fds.sgd(1.0), steps=1, batch=lambda _: (tokens[:count], targets[:count]))
        return count * torch.cat([(start - params[path]).flatten() for path, start in first().items()])

    assert (total(9) - total(8)).norm() < 0.1 + 1e-4


def main(
    steps: int = 100, lengths: tuple[float, ...] = (0.1, 1.0), multipliers: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
) -> str:
    """The validation loss by clipping length and noise; a step moves as far for each length."""
    lines = []
    for length in lengths:
        losses = [
            validation(train(dp_sgd(length, noise), optimizer=fds.sgd(1.0 / length, momentum=0.5), steps=steps)[0])
            for noise in multipliers
        ]
        lines.append((length, *losses))
    return table(["clipped to", *(f"noise x {noise:g}" for noise in multipliers)], lines)


TINY = {"steps": 2, "lengths": (0.1,), "multipliers": (0.0, 1.0)}

if __name__ == "__main__":
    law()
    print(main())
