"""What a forward leaves for its backward, and the sums of weights' gradients."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from functional_ds.tape import wide

from .splitting import Rest, backward_inputs

__all__ = ["Flight", "Sums"]


@attrs.define(eq=False)
class Flight:
    """A micro-batch between a stage's forward and its backward.

    Attributes:
        inputs: leaves whose gradients go to the stage before.
        edges: where the outputs' gradients come in; the outputs themselves may be gone.
        rest: after a backward for inputs alone, what gives the weights' gradients.
    """

    inputs: list[Tensor]
    edges: list[Any]
    rest: Rest | None = None

    @staticmethod
    def of(inputs: list[Tensor], outputs: Sequence[Tensor]) -> "Flight":
        """A stage's inputs, and those of its outputs through which gradients flow."""
        return Flight(inputs, [get_gradient_edge(output) for output in outputs])

    def backward(self, seeds: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The gradients of the inputs, zero where nothing depends on one, and of the weights."""
        asked = [*self.inputs, *weights]
        if not self.edges or not asked:
            return self._dense([None] * len(self.inputs)), [None] * len(weights)
        found = torch.autograd.grad(self.edges, asked, seeds, allow_unused=True)
        count = len(self.inputs)
        return self._dense(found[:count]), list(found[count:])

    def backward_inputs(self, seeds: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the inputs alone."""
        if not self.edges:
            self.rest = Rest(weights, [None] * len(weights))
            return self._dense([None] * len(self.inputs))
        found, self.rest = backward_inputs(self.edges, seeds, self.inputs, weights)
        self.edges = []  # what is left holds those that it needs
        return self._dense(found)

    def backward_weights(self) -> list[Tensor | None]:
        """The gradients of the weights, after those of the inputs."""
        if self.rest is None:
            raise RuntimeError("the backward for weights comes after that for inputs")
        return self.rest.run()

    def _dense(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, self.inputs, strict=True)]


@attrs.define(eq=False)
class Sums:
    """Running sums of lists of gradients; sums of half-precision ones grow in fp32.

    Attributes:
        count: how many lists there will be.
    """

    count: int
    grads: list[Tensor | None] = attrs.field(factory=list)
    _owned: set[int] = attrs.field(factory=set)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Adds a list. The first gradients are kept as they come: autograd may have given them to others, too."""
        self.grads = self.grads or [None] * len(grads)
        own: list[tuple[Tensor, Tensor]] = []
        shared: list[tuple[int, Tensor, Tensor]] = []
        for i, grad in enumerate(grads):
            total = self.grads[i]
            if grad is None:
                continue
            if total is None:
                self.grads[i] = wide(grad) if self._grows(grad) else grad
            elif i in self._owned:
                own.append((total, grad))
            else:
                shared.append((i, total, grad))
        if own:
            torch._foreach_add_([total for total, _ in own], [grad for _, grad in own])
        if shared:
            sums = torch._foreach_add([total for _, total, _ in shared], [grad for _, _, grad in shared])
            for (i, _, _), total in zip(shared, sums, strict=True):
                self.grads[i] = total
                self._owned.add(i)

    def _grows(self, grad: Tensor) -> bool:
        return self.count > 1 and grad.dtype in (torch.float16, torch.bfloat16)
