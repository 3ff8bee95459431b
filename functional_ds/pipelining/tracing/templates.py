"""``Template``: a value of any structure without its tensors, which are filled in later; ``Arguments``: those of a call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import optree
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.containers import register_containers
from functional_ds.base.torch_private import disable_torch_function_subclass
from functional_ds.modules.deep_copy import fields_of

__all__ = ["Arguments", "Placeholder", "Template", "make_template", "opaque_holder", "tensors_in"]

_ATOMS = (nn.Module, type, str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size, type(None))


@attrs.frozen
class Placeholder:
    """Stands for a tensor, by number."""

    number: int


@attrs.frozen(eq=False)
class Template:
    """What is left of a value when its tensors are taken out.

    Attributes:
        spec: the value's structure.
        leaves: its leaves, a ``Placeholder`` for each tensor.
    """

    spec: optree.PyTreeSpec
    leaves: tuple[Any, ...]

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """The value with these tensors."""
        return tree.unflatten(self.spec, [tensors[x.number] if type(x) is Placeholder else x for x in self.leaves])


def make_template(value: Any, of: Callable[[Tensor], Placeholder]) -> Template:
    """The template of a value, with ``of(tensor)`` in the place of each of its tensors.

    Objects that are no pytrees, and that ``register_containers`` cannot make pytrees, are kept as they are.

    >>> made = make_template((torch.zeros(2), {"n": 3}), lambda tensor: Placeholder(7))
    >>> made.fill({7: "here"})
    ('here', {'n': 3})
    """
    leaves, spec = _flattened(value)
    return Template(spec, tuple([of(x) if isinstance(x, Tensor) else x for x in leaves]))


def tensors_in(value: Any) -> list[tuple[int, Tensor]]:
    """The tensors of a value, and the place of each among its leaves."""
    return [(place, leaf) for place, leaf in enumerate(_flattened(value)[0]) if isinstance(leaf, Tensor)]


def opaque_holder(value: Any) -> type | None:
    """The type of an object within a value that holds tensors where ``make_template`` does not find them; None if none does."""
    return next(map(type, _holders(_flattened(value)[0])), None)


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
        leaves, spec = _flattened((args, dict(kwargs)))
        tensors = tuple([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        numbers = iter(range(len(tensors)))
        numbered = tuple([Placeholder(next(numbers)) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        return Arguments(tensors, Template(spec, numbered))

    @property
    def structure(self) -> Any:
        """All but the tensors, to compare; ``1`` and ``True`` are different arguments."""
        return self.template.spec, tuple([(type(leaf), leaf) for leaf in self.template.leaves])

    def replaced(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """(args, kwargs) with other tensors."""
        return self.template.fill(dict(enumerate(tensors)))  # type: ignore[no-any-return]

    def device(self, params: Mapping[str, Tensor]) -> torch.device:
        """The device that the module runs on: the parameters', else the arguments'."""
        with disable_torch_function_subclass():  # a deferred leaf need not be fetched for this
            found = next((leaf.device for leaf in params.values()), None)
            return found or next((tensor.device for tensor in self.tensors), torch.device("cpu"))


def _flattened(value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the structure of a value, of which all containers are taken apart that can be."""
    leaves, spec = tree.flatten(value)
    holders = _holders(leaves)
    if not holders:
        return leaves, spec
    register_containers(holders)
    return tree.flatten(value)


def _holders(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor) and _holds_tensors(leaf, set())]


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """Whether there is a tensor anywhere in an object."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, _ATOMS) or callable(value) or id(value) in seen:
        return False
    seen.add(id(value))
    inner = tree.leaves(value)
    if tree.is_leaf(value):
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        inner = [*fields_of(value).values(), *items]
    return any(_holds_tensors(x, seen) for x in inner)
