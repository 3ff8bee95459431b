"""Maximal update parametrisation: one learning rate for all widths, found by one batched run for each.

Under muP (Yang et al. 2022, arXiv:2203.03466) the best learning rate of a narrow model is that of a wide one: Adam's rate of a
matrix whose input is as wide as the model falls with the width, and the last matrix starts smaller. All learning rates of a
width train together: ``vmap`` over steps.

Law: at the base width both parametrisations are one; a batch of runs is a loop; after one step the logits of muP have moved
about as far at any width, and those of the standard parametrisation further.
"""

from typing import Any

import torch
from shared import Batch, rows, table
from torch import Tensor

import functional_ds as fds

BASE, CONTEXT, EMBEDDING = 16, 8, 8


def start(width: int, *, scaled: bool) -> dict[str, Tensor]:
    """First params; ``scaled``: of muP, whose last matrix is smaller by the root of the width over the base width."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (256, EMBEDDING), "first": (CONTEXT * EMBEDDING, width), "middle": (width, width), "head": (width, 256)}
    params = {name: torch.randn(shape, generator=generator) * shape[0] ** -0.5 for name, shape in shapes.items()}
    return params | {"head": params["head"] * (BASE / width) ** 0.5} if scaled else params


def logits(params: Any, tokens: Tensor) -> Tensor:
    """Scores of the next byte."""
    return torch.tanh(torch.tanh(params["embed"][tokens].flatten(1) @ params["first"]) @ params["middle"]) @ params["head"]


def loss_fn(params: Any, batch: Batch) -> Tensor:
    """The mean cross entropy in nats."""
    return torch.nn.functional.cross_entropy(logits(params, batch[0]), batch[1])


def adam(rate: Any, width: int, *, scaled: bool) -> Any:
    """Adam; ``scaled``: of muP, by which the rate of matrices whose input is as wide as the model falls with the width."""
    narrow = rate * (BASE / width if scaled else 1.0)
    return fds.param_groups({"middle|head": fds.adam(narrow)}, fds.adam(rate))


def trained(rate: Tensor, width: int, steps: int, *, scaled: bool) -> Any:
    """The step, and its state after some steps at a learning rate."""
    step = fds.differentiable(fds.train_step(loss_fn, adam(rate, width, scaled=scaled)))
    state = step.init(start(width, scaled=scaled))
    for index in range(steps):
        state, _ = step(state, rows(index))
    return step, state


def losses(rates: Tensor, width: int, steps: int, *, scaled: bool) -> Tensor:
    """The loss on text that is not trained on, for each learning rate: one batched run."""

    def loss(rate: Tensor) -> Tensor:
        step, state = trained(rate, width, steps, scaled=scaled)
        return step.evaluate(state, rows(0, split="validation", count=256))

    with torch.no_grad():
        return torch.func.vmap(loss, randomness="same")(rates)


def moved(width: int, *, scaled: bool) -> float:
    """How far one step moves the logits, as a root mean square."""
    tokens, _ = rows(0)
    with torch.no_grad():
        step, state = trained(torch.tensor(0.01), width, 1, scaled=scaled)
        change = logits(step.params(state), tokens) - logits(start(width, scaled=scaled), tokens)
    return change.square().mean().sqrt().item()


def law() -> None:
    """Equal at the base width, a loop, and moves that do not grow with the width."""
    rates = torch.tensor([0.003, 0.01])
    one, other = (losses(rates, BASE, 2, scaled=scaled) for scaled in (False, True))
    torch.testing.assert_close(one, other)
    loop = torch.cat([losses(rate[None], 32, 2, scaled=True) for rate in rates])
    torch.testing.assert_close(losses(rates, 32, 2, scaled=True), loop)
    by_width = {scaled: moved(512, scaled=scaled) / moved(BASE, scaled=scaled) for scaled in (False, True)}
    assert by_width[True] < 2 < 5 < by_width[False], by_width


def main(steps: int = 60, widths: tuple[int, ...] = (16, 64, 256)) -> str:
    """Losses by learning rate and width; the best of each column has a star."""
    rates = 2.0 ** -torch.arange(2.0, 11.0)
    head, columns = ["learning rate"], []
    for scaled in (False, True):
        for width in widths:
            found = losses(rates, width, steps, scaled=scaled)
            best = int(found.argmin())
            columns.append([f"{loss:.3f}{'*' if place == best else ' '}" for place, loss in enumerate(found.tolist())])
            head.append(f"{'muP' if scaled else 'standard'} {width}")
    return table(head, [(f"2^-{power}", *cells) for power, cells in zip(range(2, 11), zip(*columns, strict=True), strict=True)])


TINY = {"steps": 1, "widths": (16,)}

if __name__ == "__main__":
    law()
    print(main())
