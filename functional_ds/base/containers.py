"""Registers containers that optree does not know as pytrees, when they occur in a batch."""

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import optree
from torch import Tensor

from . import tree
from .torch_private import pytree_node_of

Flat = tuple[tuple[Any, ...], Any, tuple[str, ...]]  # children, the context to rebuild from, names of the children

_LOCK = threading.Lock()


def register_containers(value: Any) -> None:
    """Registers the types of the containers in ``value`` as pytrees, for the process.

    These are types that are registered with ``torch.utils._pytree``; dataclasses and attrs classes, by their fields; and
    mappings whose class can be made from a dict, such as ``transformers.BatchEncoding``. Other types stay leaves.

    >>> from collections import UserDict
    >>> batch = UserDict(x=1, y=2)
    >>> register_containers(batch)
    >>> tree.map(lambda leaf: 2 * leaf, batch)
    {'x': 2, 'y': 4}
    """
    while True:
        by_class = {type(leaf): leaf for leaf in tree.leaves(value) if not isinstance(leaf, (Tensor, type))}
        if not sum(_register(cls, leaf) for cls, leaf in by_class.items()):
            return


def _register(cls: type, value: Any) -> bool:
    functions = _functions(cls, value)
    if functions is None:
        return False
    with _LOCK:  # simulated ranks are threads
        if not tree.is_leaf(value):
            return True
        flatten, unflatten = functions
        optree.register_pytree_node(cls, flatten, unflatten, namespace=tree.NAMESPACE)
    return True


def _functions(cls: type, value: Any) -> tuple[Callable[[Any], Flat], Callable[[Any, Any], Any]] | None:
    known = pytree_node_of(cls)
    if known is not None:
        flatten, unflatten = known

        def children(whole: Any) -> Flat:
            leaves, context = flatten(whole)
            return tuple(leaves), _Context(context), tuple(map(str, range(len(leaves))))

        return children, lambda context, leaves: unflatten(list(leaves), context.value)
    if isinstance(value, Mapping) and _rebuilds(cls, value):
        return _items, lambda keys, leaves: cls(dict(zip(keys, leaves, strict=True)))
    if dataclasses.is_dataclass(cls) or attrs.has(cls):
        return _fields, lambda names, leaves: _made(cls, names, leaves)
    return None


@attrs.frozen
class _Context:
    """The context of torch's pytrees, made hashable for optree."""

    value: Any = attrs.field(hash=False)


def _items(whole: Mapping[Any, Any]) -> Flat:
    keys = tuple(sorted(whole, key=str))  # as in a dict: two orders are one structure
    return tuple(whole[key] for key in keys), keys, tuple(map(str, keys))


def _rebuilds(cls: Callable[[Any], Any], value: Mapping[Any, Any]) -> bool:
    """Whether the class makes an equal mapping from a dict."""
    try:
        made = cls(dict(value))
        return type(made) is cls and list(made) == list(value) and all(made[key] is value[key] for key in value)
    except (TypeError, ValueError, AttributeError, KeyError):
        return False


def _fields(whole: Any) -> Flat:
    fields = dataclasses.fields(whole) if dataclasses.is_dataclass(whole) else attrs.fields(type(whole))
    names = tuple(field.name for field in fields if hasattr(whole, field.name))
    return tuple(getattr(whole, name) for name in names), names, names


def _made(cls: type, names: tuple[str, ...], leaves: Any) -> Any:
    """Makes an instance without ``__init__``, which may check or compute, since leaves may be anything."""
    made: Any = object.__new__(cls)
    for name, value in zip(names, leaves, strict=True):
        object.__setattr__(made, name, value)
    return made
