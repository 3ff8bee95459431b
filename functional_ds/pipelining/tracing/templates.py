"""``Mould``: a value of any structure without its tensors, which are filled in later."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

__all__ = ["Fixed", "Hole", "Mould", "Place", "at", "hides", "mould", "tensors_in"]

Step = tuple[str, Any]  # ("item", key) or ("field", name)
Place = tuple[Step, ...]  # the way to a part of a value, outermost first


class Mould(Protocol):
    """What is left of a value when its tensors are taken out."""

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """The value with these tensors."""
        ...


@attrs.frozen
class Hole:
    """Where a tensor belongs."""

    number: int

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """That tensor."""
        return tensors[self.number]


@attrs.frozen(eq=False)
class Fixed:
    """A value without tensors. Two are equal if type and value are: ``Fixed(1) != Fixed(True)``."""

    value: Any

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """The value."""
        return self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and type(self.value) is type(other.value) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


@attrs.frozen
class _Row:
    """A tuple, list, named tuple or one of torch's return types."""

    kind: type
    parts: tuple[Mould, ...]

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """The filled row."""
        parts = [part.fill(tensors) for part in self.parts]
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)


@attrs.frozen
class _Named:
    """A dict, or an object that is made from named parts: a dataclass, an attrs class, a slice."""

    make: Callable[..., Any]
    names: tuple[Any, ...]
    parts: tuple[Mould, ...]

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """The dict or object, made anew."""
        parts = {name: part.fill(tensors) for name, part in zip(self.names, self.parts, strict=True)}
        return parts if self.make is dict else self.make(**parts)


def mould(value: Any, of: Callable[[Tensor], Mould]) -> Mould:
    """The mould of a value, with ``of(tensor)`` in the place of each of its tensors.

    Objects other than tuples, lists, dicts, slices, dataclasses and attrs classes stay as they are.

    >>> made = mould((torch.zeros(2), {"n": 3}), lambda tensor: Hole(7))
    >>> made.fill({7: "here"})
    ('here', {'n': 3})
    """
    if isinstance(value, Tensor):
        return of(value)
    found = _parts(value)
    if found is None:
        return Fixed(value)
    parts = tuple(mould(part, of) for _, part in found)
    if isinstance(value, (tuple, list)):
        return _Row(type(value), parts)
    if isinstance(value, slice):
        return _Named(_slice, ("start", "stop", "step"), parts)
    fields = _fields(value)
    if fields is None:
        return _Named(dict, tuple(value), parts)
    return _Named(type(value), tuple(alias for _, alias in fields), parts)


def tensors_in(value: Any) -> Iterator[tuple[Place, Tensor]]:
    """The tensors of a value and the way to each."""
    if isinstance(value, Tensor):
        yield (), value
    for step, part in _parts(value) or ():
        for place, tensor in tensors_in(part):
            yield (step, *place), tensor


def at(value: Any, place: Place) -> Any:
    """What is at a place of a value."""
    for kind, key in place:
        value = value[key] if kind == "item" else getattr(value, key)
    return value


def hides(value: Any) -> type | None:
    """The type of an object within a value that holds tensors where no mould finds them; None for no such object."""
    parts = _parts(value)
    if parts is None:
        return type(value) if not isinstance(value, Tensor) and _holds(value, set()) else None
    return next((found for _, part in parts if (found := hides(part)) is not None), None)


_ATOMS = (nn.Module, type, str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size, type(None))


def _holds(value: Any, seen: set[int]) -> bool:
    """Whether there is a tensor anywhere in an object."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, _ATOMS) or callable(value) or id(value) in seen:
        return False
    seen.add(id(value))
    parts = _parts(value)
    inner = [part for _, part in parts] if parts is not None else list(getattr(value, "__dict__", {}).values())
    return any(_holds(part, seen) for part in inner)


def _parts(value: Any) -> list[tuple[Step, Any]] | None:
    """The parts of a value that a mould looks into; None where it is one of its own."""
    if isinstance(value, (*_ATOMS, Tensor)):
        return None
    if isinstance(value, (tuple, list)):
        return [(("item", index), part) for index, part in enumerate(value)]
    if isinstance(value, slice):
        return [(("field", name), getattr(value, name)) for name in ("start", "stop", "step")]
    fields = _fields(value)
    if fields is not None:
        return [(("field", name), getattr(value, name)) for name, _ in fields]
    if isinstance(value, dict):
        return [(("item", key), part) for key, part in value.items()]
    return None


def _fields(value: Any) -> list[tuple[str, str]] | None:
    """The fields that an object is made from, and what its class calls them; None for no such object."""
    if dataclasses.is_dataclass(value):
        return [(field.name, field.name) for field in dataclasses.fields(value) if field.init]
    if attrs.has(type(value)):
        return [(field.name, field.alias or field.name) for field in attrs.fields(type(value)) if field.init]
    return None


def _slice(start: Any, stop: Any, step: Any) -> slice:
    return slice(start, stop, step)
