"""``Template``: a value of any structure without its tensors, which are filled in later."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

__all__ = ["Fixed", "KeyPath", "Placeholder", "Template", "get_at", "make_template", "opaque_holder", "tensors_in"]

KeyEntry = tuple[str, Any]  # ("item", key) or ("field", name)
KeyPath = tuple[KeyEntry, ...]  # the way to a part of a value, outermost first


class Template(Protocol):
    """What is left of a value when its tensors are taken out."""

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """The value with these tensors."""
        ...


@attrs.frozen
class Placeholder:
    """Stands for a tensor, by number."""

    number: int

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """That tensor."""
        return tensors[self.number]


@attrs.frozen(eq=False)
class Fixed:
    """A value without tensors. Two are equal if both type and value are: ``Fixed(1) != Fixed(True)``."""

    value: Any

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """The value."""
        return self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and type(self.value) is type(other.value) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


@attrs.frozen
class _Sequence:
    """A tuple, list, named tuple or one of torch's return types."""

    kind: type
    parts: tuple[Template, ...]

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """The sequence, made anew."""
        parts = [part.fill(tensors) for part in self.parts]
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)


@attrs.frozen
class _Keyed:
    """A dict, or an object that is built from keyword arguments: a dataclass, an attrs class, a slice."""

    make: Callable[..., Any]
    keys: tuple[Any, ...]
    parts: tuple[Template, ...]

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """The dict or object, made anew."""
        parts = {key: part.fill(tensors) for key, part in zip(self.keys, self.parts, strict=True)}
        return parts if self.make is dict else self.make(**parts)


def make_template(value: Any, of: Callable[[Tensor], Template]) -> Template:
    """The template of a value, with ``of(tensor)`` in the place of each of its tensors.

    Objects other than tuples, lists, dicts, slices, dataclasses and attrs classes are kept as they are.

    >>> made = make_template((torch.zeros(2), {"n": 3}), lambda tensor: Placeholder(7))
    >>> made.fill({7: "here"})
    ('here', {'n': 3})
    """
    if isinstance(value, Tensor):
        return of(value)
    children = _children(value)
    if children is None:
        return Fixed(value)
    parts = tuple(make_template(child, of) for _, child in children)
    if isinstance(value, (tuple, list)):
        return _Sequence(type(value), parts)
    if isinstance(value, slice):
        return _Keyed(_slice, ("start", "stop", "step"), parts)
    fields = _fields(value)
    if fields is None:
        return _Keyed(dict, tuple(value), parts)
    return _Keyed(type(value), tuple(argument for _, argument in fields), parts)


def tensors_in(value: Any) -> Iterator[tuple[KeyPath, Tensor]]:
    """The tensors of a value and the path to each."""
    if isinstance(value, Tensor):
        yield (), value
    for entry, child in _children(value) or ():
        for path, tensor in tensors_in(child):
            yield (entry, *path), tensor


def get_at(value: Any, path: KeyPath) -> Any:
    """The part of a value at a path."""
    for kind, key in path:
        value = value[key] if kind == "item" else getattr(value, key)
    return value


def opaque_holder(value: Any) -> type | None:
    """The type of an object within a value that holds tensors where ``make_template`` does not find them; None if none does."""
    children = _children(value)
    if children is None:
        return type(value) if not isinstance(value, Tensor) and _holds_tensors(value, set()) else None
    return next((found for _, child in children if (found := opaque_holder(child)) is not None), None)


_ATOMS = (nn.Module, type, str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size, type(None))


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """Whether there is a tensor anywhere in an object."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, _ATOMS) or callable(value) or id(value) in seen:
        return False
    seen.add(id(value))
    children = _children(value)
    inner = [child for _, child in children] if children is not None else list(getattr(value, "__dict__", {}).values())
    return any(_holds_tensors(child, seen) for child in inner)


def _children(value: Any) -> list[tuple[KeyEntry, Any]] | None:
    """The parts of a value, each with its key; None for a value that is not taken apart."""
    if isinstance(value, (*_ATOMS, Tensor)):
        return None
    if isinstance(value, (tuple, list)):
        return [(("item", index), child) for index, child in enumerate(value)]
    if isinstance(value, slice):
        return [(("field", name), getattr(value, name)) for name in ("start", "stop", "step")]
    fields = _fields(value)
    if fields is not None:
        return [(("field", name), getattr(value, name)) for name, _ in fields]
    if isinstance(value, dict):
        return [(("item", key), child) for key, child in value.items()]
    return None


def _fields(value: Any) -> list[tuple[str, str]] | None:
    """The fields of a dataclass or attrs object, each with its argument's name; None for any other object."""
    if dataclasses.is_dataclass(value):
        return [(field.name, field.name) for field in dataclasses.fields(value) if field.init]
    if attrs.has(type(value)):
        return [(field.name, field.alias or field.name) for field in attrs.fields(type(value)) if field.init]
    return None


def _slice(start: Any, stop: Any, step: Any) -> slice:
    return slice(start, stop, step)
