"""Objects among a function's arguments, as they were before it wrote into them: a cache of keys and values, say."""

import copy
import types
from collections import deque
from typing import Any

from torch import Tensor, nn

__all__ = ["snapshot"]

_SHARED = (Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)
_CONTAINERS = (list, tuple, dict, set, deque)


def snapshot(values: list[Any]) -> list[Any]:
    """Copies of objects and of the containers and objects inside; tensors, modules and functions stay the same.

    ``transformers.DynamicCache`` appends to lists and sets attributes, so a layer that runs again must find it as it was.
    Tensors that are written in place are not copied.
    """
    memo: dict[int, Any] = {}
    return [_copied(value, memo) for value in values]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    plain = type(value) in _CONTAINERS
    if isinstance(value, _SHARED) or not (plain or hasattr(value, "__dict__")):
        return value
    if id(value) not in memo:
        try:
            memo[id(value)] = made = copy.copy(value)
        except (TypeError, AttributeError, ValueError):  # it cannot be copied, so it stays as the first run leaves it
            return memo.setdefault(id(value), value)
        if isinstance(made, dict):
            made.update({key: _copied(each, memo) for key, each in made.items()})
        elif isinstance(value, deque):
            memo[id(value)] = deque((_copied(each, memo) for each in value), value.maxlen)
        elif plain:
            memo[id(value)] = type(value)(_copied(each, memo) for each in value)
        if not plain:
            vars(made).update({key: _copied(each, memo) for key, each in vars(value).items()})
    return memo[id(value)]
