"""What a trial of a step leaves in the caches of a state: orders, agreements, kinds of graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from torch import Tensor, nn

from functional_ds.comm.record.group import Group
from functional_ds.step.state import State

__all__ = ["caches_as_before"]


@contextmanager
def caches_as_before(state: State) -> Iterator[None]:
    """Within the block a step may run without values; afterwards the state's caches are as they were.

    Ranks learn in eager steps, together. What one rank's trace alone had changed would part it from the others.
    """
    found: dict[int, tuple[Any, dict[str, Any]]] = {}
    _look(state, found, set())
    try:
        yield
    finally:
        for cache, fields in found.values():
            for name, value in fields.items():
                setattr(cache, name, value)


def _look(value: Any, found: dict[int, tuple[Any, dict[str, Any]]], seen: set[int]) -> None:
    if id(value) in seen or isinstance(value, (Tensor, nn.Module, Group)):
        return
    seen.add(id(value))
    if attrs.has(type(value)):
        fields = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
        if not _is_frozen(type(value)):
            found[id(value)] = value, {name: _apart(held) for name, held in fields.items()}
        for held in fields.values():
            _look(held, found, seen)
    elif type(value) in (dict, list, tuple):
        for held in value.values() if isinstance(value, dict) else value:
            _look(held, found, seen)


def _is_frozen(kind: type) -> bool:
    return getattr(kind.__setattr__, "__name__", "") == "_frozen_setattrs"


def _apart(held: Any) -> Any:
    return held.copy() if type(held) in (dict, list, set) else held
