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
        found = {type(leaf): leaf for leaf in tree.leaves(value) if not isinstance(leaf, (Tensor, type))}
        if not sum(_register(kind, leaf) for kind, leaf in found.items()):
            return


def _register(kind: type, value: Any) -> bool:
    functions = _functions(kind, value)
    if functions is None:
        return False
    with _LOCK:  # simulated ranks are threads
        if not tree.is_leaf(value):
            return True
        flatten, unflatten = functions
        optree.register_pytree_node(kind, flatten, unflatten, namespace=tree.NAMESPACE)
    return True


def _functions(kind: type, value: Any) -> tuple[Callable[[Any], Flat], Callable[[Any, Any], Any]] | None:
    known = pytree_node_of(kind)
    if known is not None:
        flatten, unflatten = known

        def children(whole: Any) -> Flat:
            found, context = flatten(whole)
            return tuple(found), _Context(context), tuple(map(str, range(len(found))))

        return children, lambda context, found: unflatten(list(found), context.value)
    if isinstance(value, Mapping) and _rebuilds(kind, value):
        return _items, lambda keys, found: kind(dict(zip(keys, found, strict=True)))
    if dataclasses.is_dataclass(kind) or attrs.has(kind):
        return _fields, lambda names, found: _made(kind, names, found)
    return None


@attrs.frozen
class _Context:
    """The context of torch's pytrees, made hashable for optree."""

    value: Any = attrs.field(hash=False)


def _items(whole: Mapping[Any, Any]) -> Flat:
    keys = tuple(sorted(whole, key=str))  # as in a dict: two orders are one structure
    return tuple(whole[key] for key in keys), keys, tuple(map(str, keys))


def _rebuilds(kind: Callable[[Any], Any], value: Mapping[Any, Any]) -> bool:
    """Whether the class makes an equal mapping from a dict."""
    try:
        made = kind(dict(value))
        return type(made) is kind and list(made) == list(value) and all(made[key] is value[key] for key in value)
    except (TypeError, ValueError, AttributeError, KeyError):
        return False


def _fields(whole: Any) -> Flat:
    fields = dataclasses.fields(whole) if dataclasses.is_dataclass(whole) else attrs.fields(type(whole))
    names = tuple(field.name for field in fields if hasattr(whole, field.name))
    return tuple(getattr(whole, name) for name in names), names, names


def _made(kind: type, names: tuple[str, ...], found: Any) -> Any:
    """Makes an instance without ``__init__``, which may check or compute, since leaves may be anything."""
    made: Any = object.__new__(kind)
    for name, value in zip(names, found, strict=True):
        object.__setattr__(made, name, value)
    return made
