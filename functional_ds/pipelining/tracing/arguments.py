"""``Arguments``: what a module is called with, its tensors apart from the rest."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.torch_private import disable_torch_function_subclass
from functional_ds.pipelining.stages.stages import Params

from .templates import Placeholder, Template, make_template, tensors_in

__all__ = ["Arguments"]


@attrs.frozen(eq=False)
class Arguments:
    """What a module is called with.

    Attributes:
        tensors: those in it, in order.
        template: of (args, kwargs), with a number for each tensor.
    """

    tensors: tuple[Tensor, ...]
    template: Template

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Arguments":
        """The record of a call's arguments."""
        given, numbers = (args, dict(kwargs)), itertools.count()
        template = make_template(given, lambda tensor: Placeholder(next(numbers)))
        return Arguments(tuple([tensor for _, tensor in tensors_in(given)]), template)

    @property
    def structure(self) -> Any:
        """All but the tensors, to compare; ``1`` and ``True`` are different arguments."""
        return self.template.spec, tuple([(type(leaf), leaf) for leaf in self.template.leaves])

    def replaced(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """(args, kwargs) with other tensors."""
        return self.template.fill(dict(enumerate(tensors)))  # type: ignore[no-any-return]

    def device(self, params: Params) -> torch.device:
        """The device that the module runs on: the parameters', else the arguments'."""
        with disable_torch_function_subclass():  # a deferred leaf need not be fetched for this
            found = next((leaf.device for leaf in params.values()), None)
            return found or next((tensor.device for tensor in self.tensors), torch.device("cpu"))
