"""``Arguments``: what a module is called with, its tensors apart from the rest."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.torch_private import disable_torch_function_subclass
from functional_ds.pipelining.stages.stages import Params

from .templates import Placeholder, Template, make_template

__all__ = ["Arguments"]


@attrs.frozen(eq=False)
class Arguments:
    """What a module is called with.

    Attributes:
        args, kwargs: as given.
        tensors: those in them, in order.
        structure: all else about them, to compare: their template, or, where all arguments are tensors, how many there are
            and their names.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    structure: Any

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Arguments":
        """The record of a call's arguments."""
        values = (*args, *kwargs.values())
        if all(type(each) is Tensor for each in values):  # the fast path: every action of a pipeline comes here
            return Arguments(args, kwargs, values, (len(args), tuple(kwargs)))
        template, tensors = _taken_apart(args, kwargs)
        return Arguments(args, kwargs, tensors, template)

    def replaced(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """The same (args, kwargs) with other tensors."""
        return _taken_apart(self.args, self.kwargs)[0].fill(dict(enumerate(tensors)))  # type: ignore[no-any-return]

    def device(self, params: Params) -> torch.device:
        """The device that the module runs on: the parameters', else the arguments'."""
        with disable_torch_function_subclass():  # a deferred leaf need not be fetched for this
            found = next((leaf.device for leaf in params.values()), None)
            return found or next((tensor.device for tensor in self.tensors), torch.device("cpu"))


def _taken_apart(args: Any, kwargs: Any) -> tuple[Template, tuple[Tensor, ...]]:
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Template:
        tensors.append(tensor)
        return Placeholder(len(tensors) - 1)

    return make_template((tuple(args), dict(kwargs)), take), tuple(tensors)
