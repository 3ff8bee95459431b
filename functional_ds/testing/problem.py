"""The training problem for methods under test."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.tree import rows_of

DIVISOR = 12  # laws divide a batch among up to 4 ranks, and into two micro-batches


def _first(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"] + params["b"])


def _second(params: Any, x: Tensor) -> Tensor:
    y: Tensor = x @ params["w"] * params["scale"] + params["b"]
    return y


def _error(y: Tensor, batch: Tensor) -> Tensor:
    return (y - torch.sin(2 * batch[:, :2])).square().mean()


def _loss(params: Any, batch: Tensor) -> Tensor:
    return _error(_second(params[1], _first(params[0], batch)), batch)


def _unused(params: Any, batch: Tensor) -> Tensor:
    return _error(_first(params[0], batch) @ params[1]["w"] * params[1]["scale"], batch)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


@attrs.frozen(eq=False, kw_only=True)
class Problem:
    """A training problem: params, a loss and batches; it should be small, since laws run hundreds of steps.

    The default is a regression with two layers: params are a list of two dicts, and a batch is a tensor [24, 5].

    Attributes:
        params: a pytree of tensors.
        loss: as for ``fds.train_step``.
        batches: whole batches, of which each rank gets its rows; the number of rows is a multiple of 12.
        unused: a loss that does not use some of the leaves; None to skip the law "unused leaves". With ``holds(axis=)`` it also
            runs on one device, without the transform.
        layers: functions ``f(params, x) -> x`` as for ``pipelining.stages``, one for each entry of ``params``; None to skip the
            law "pipelines".
        error: the loss of the last layer's output, ``error(y, batch)``.
        plain: with ``holds(axis=)``, a loss that computes on one device, without the transform, what ``loss`` does with it, as
            ``F.linear`` does for ``fds.tp.row``; by default ``loss``.

    Raises:
        ValueError: the rows of a batch are not a multiple of 12, or there are no batches.

    >>> Problem().rows(0).shape
    torch.Size([24, 5])
    """

    params: Any = attrs.field(
        factory=lambda: [
            {"w": _normal(0, 5, 7), "b": _normal(1, 7)},
            {"w": _normal(2, 7, 2), "scale": torch.ones(()), "b": _normal(3, 2)},
        ]
    )
    loss: Callable[..., Any] = _loss
    batches: Sequence[Any] = attrs.field(factory=lambda: [2 * _normal(10 + index, 24, 5) for index in range(6)])
    unused: Callable[..., Any] | None = attrs.Factory(lambda self: _unused if self.loss is _loss else None, takes_self=True)
    layers: Sequence[Callable[..., Any]] | None = attrs.Factory(
        lambda self: (_first, _second) if self.loss is _loss else None, takes_self=True
    )
    error: Callable[..., Any] | None = attrs.Factory(lambda self: _error if self.loss is _loss else None, takes_self=True)
    plain: Callable[..., Any] | None = None

    def __attrs_post_init__(self) -> None:
        wrong = [rows_of(batch) for batch in self.batches if rows_of(batch) % DIVISOR or not rows_of(batch)]
        if wrong or not self.batches:
            raise ValueError(f"batches: laws divide a batch among up to 4 ranks; give multiples of {DIVISOR} rows, not {wrong}")

    def rows(self, index: int) -> Any:
        """This rank's rows of a batch."""
        here = comm.world()
        return tree.map(lambda leaf: leaf.chunk(here.size)[here.rank], self.batches[index % len(self.batches)])
