"""A refusal as a record, and what programs that are refused have in common."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

import functional_ds as fds


@attrs.frozen(kw_only=True)
class Refusal:
    """A program that is refused.

    Attributes:
        what: the program in a few words.
        error: the class of the error, which no subclass stands for.
        says: a regular expression of the message's core.
        advises: a regular expression of the part of the message that says what would do.
        why: the reason, as a sentence.
        instead: what would do, as a sentence.
        program: raises the error.
    """

    what: str
    error: type[Exception]
    says: str
    advises: str
    why: str
    instead: str
    program: Callable[[], Any]


def rows(count: int = 4) -> Tensor:
    return torch.ones(count, 3)


def square(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def weights() -> dict[str, Tensor]:
    return {"w": torch.ones(3, 2)}


def made(*strategy: fds.Transform, loss: Any = square, rule: Any = None) -> fds.Step:
    return fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1) if rule is None else rule))


def train(module: nn.Module, *strategy: fds.Transform, batches: tuple[Any, ...] = (torch.ones(4, 3),)) -> None:
    """The steps of a module, whose loss is the mean square of what it returns."""
    apply, params = fds.functional(module)
    step = made(*strategy, loss=lambda params, x: apply(params, x).square().mean())
    state = step.init(params)
    for batch in batches:
        state, _ = step(state, batch)
