"""What a forward leaves for its backward."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from functional_ds.base.torch_private import storage_id

from .split_backward import Rest, accumulate, backward_inputs

__all__ = ["Flight"]


@attrs.define(eq=False)
class Flight:
    """A micro-batch between a stage's forward and its backward, which adds the weights' gradients to their ``grad``.

    Attributes:
        inputs: leaves whose gradients go to the stage before.
        edges: where the outputs' gradients come in; the outputs themselves may be gone.
        rest: after a backward for inputs alone, what gives the weights' gradients.
        given: whose memory the inputs' gradients have.
    """

    inputs: list[Tensor]
    edges: list[Any]
    rest: Rest | None = None
    given: set[int] = attrs.field(factory=set)

    @staticmethod
    def of(inputs: list[Tensor], outputs: Sequence[Tensor]) -> "Flight":
        """A stage's inputs, and those of its outputs through which gradients flow."""
        return Flight(inputs, [get_gradient_edge(output) for output in outputs])

    def backward(self, seeds: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the inputs, zero where nothing depends on one; adds those of the weights."""
        new = _without(weights)
        accumulate(self.edges, seeds, [*self.inputs, *weights])
        back = self._back()
        self._separate(new)
        return back

    def backward_inputs(self, seeds: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the inputs alone."""
        new = _without(weights)
        self.rest = backward_inputs(self.edges, seeds, self.inputs, weights)
        back = self._back()
        self._separate(new)
        self.inputs, self.edges = [], []  # what is left holds those that it needs
        return back

    def backward_weights(self) -> None:
        """Adds the gradients of the weights, after those of the inputs."""
        if self.rest is None:
            raise RuntimeError("the backward for weights comes after that for inputs")
        new = _without(self.rest.weights)
        self.rest.run()
        self._separate(new)

    def _back(self) -> list[Tensor]:
        """The inputs' gradients, whose memory is noted."""
        back = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.inputs]
        self.given = {storage_id(grad) for grad in back}
        return back

    def _separate(self, new: Sequence[Tensor]) -> None:
        """Gives first gradients memory of their own: later ones are added in place, and autograd may have shared it."""
        taken = set(self.given)
        for weight in new:
            if weight.grad is not None:
                if storage_id(weight.grad) in taken:
                    weight.grad = weight.grad.clone()
                taken.add(storage_id(weight.grad))


def _without(weights: Sequence[Tensor]) -> list[Tensor]:
    """Those that have no gradient yet."""
    return [weight for weight in weights if weight.grad is None]
