"""Attaches results that were computed without autograd to the autograd graph of their inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from .calls.autograd_node import is_differentiable


@attrs.frozen(eq=False)
class Graft:
    """Attaches results to the leaves' graph; ``back`` computes the leaves' gradients from the results' gradients."""

    leaves: Sequence[Tensor]
    back: Callable[[list[Tensor]], list[Tensor]]

    @staticmethod
    def of(leaves: Sequence[Tensor], back: Callable[[list[Tensor]], list[Tensor]]) -> "Graft":
        wanted = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        return Graft(leaves if wanted else (), back)

    def __call__(self, results: list[Tensor]) -> list[Tensor]:
        smooth = [i for i, leaf in enumerate(self.leaves) if is_differentiable(leaf)]
        if not smooth:
            return results
        grafted = _StraightThrough.apply(self.back, [results[i] for i in smooth], *(self.leaves[i] for i in smooth))
        by_index = dict(zip(smooth, grafted, strict=True))
        return [by_index.get(i, result) for i, result in enumerate(results)]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, back: Callable[..., Any], results: Sequence[Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.back(list(grads)))
