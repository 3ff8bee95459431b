"""``InFlightMicroBatch``: what a stage's forward of a micro-batch leaves for its backward."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from functional_ds.base.torch_private import storage_id

from .split_backward import WeightBackward, accumulate, backward_inputs

__all__ = ["InFlightMicroBatch"]


@attrs.define(eq=False)
class InFlightMicroBatch:
    """A micro-batch between a stage's forward and its backward. The backward adds the weights' gradients to their ``grad``.

    Attributes:
        inputs: leaves whose gradients go to the stage before.
        edges: the outputs' gradient edges; the outputs themselves may have been freed.
        rest: the backward for weights that is left after a backward for inputs alone.
        returned: the storages of the inputs' gradients.
    """

    inputs: list[Tensor]
    edges: list[Any]
    rest: WeightBackward | None = None
    returned: set[int] = attrs.field(factory=set)

    @staticmethod
    def of(inputs: list[Tensor], outputs: Sequence[Tensor]) -> "InFlightMicroBatch":
        """From a stage's inputs, and those of its outputs through which gradients flow."""
        return InFlightMicroBatch(inputs, [get_gradient_edge(output) for output in outputs])

    def backward(self, seeds: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the inputs, zero where the outputs do not depend on one; adds the weights' gradients."""
        new = _without(weights)
        accumulate(self.edges, seeds, [*self.inputs, *weights])
        back = self._back()
        self._separate(new)
        return back

    def backward_inputs(self, seeds: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the inputs; ``backward_weights`` is to follow."""
        new = _without(weights)
        self.rest = backward_inputs(self.edges, seeds, self.inputs, weights)
        back = self._back()
        self._separate(new)
        self.inputs, self.edges = [], []  # ``rest`` holds what it needs
        return back

    def backward_weights(self) -> None:
        """Adds the gradients of the weights, after ``backward_inputs``."""
        if self.rest is None:
            raise RuntimeError("the backward for weights comes after that for inputs")
        new = _without(self.rest.weights)
        self.rest.run()
        self._separate(new)

    def _back(self) -> list[Tensor]:
        """The inputs' gradients; notes their storages."""
        back = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.inputs]
        self.returned = {storage_id(grad) for grad in back}
        return back

    def _separate(self, new: Sequence[Tensor]) -> None:
        """Clones first gradients that share memory: autograd may have shared it, and later gradients are added in place."""
        taken = set(self.returned)
        for weight in new:
            if weight.grad is not None:
                if storage_id(weight.grad) in taken:
                    weight.grad = weight.grad.clone()
                taken.add(storage_id(weight.grad))


def _without(weights: Sequence[Tensor]) -> list[Tensor]:
    """The weights that have no gradient yet."""
    return [weight for weight in weights if weight.grad is None]
