"""Attributes that forward passes set: in the state, kept outside of it, or of one pass only."""

import copy
import enum
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from functional_ds.base import tree


class Stale:
    """Replaces an attribute in a copy that would not follow training; raises an error when it is used.

    Modules that assign the attribute in each forward pass (``torch.nn.utils.weight_norm``, ``spectral_norm``, ``prune``) never
    use it.
    """

    def __init__(self, message: str) -> None:
        self._message = message

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(self._message)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def __deepcopy__(self, memo: Any) -> "Stale":
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises an error."""
        given = tree.leaves((args, kwargs))
        return next(leaf for leaf in given if isinstance(leaf, Stale))._refuse()

    __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __neg__ = __add__ = __radd__ = _refuse
    __call__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = _refuse


@attrs.define(eq=False)
class HiddenAttributes:
    """Attributes of ``Apply.module`` that calls set to tensors with a graph: reading them raises an error.

    Attributes:
        module: ``Apply.module``.
        overlook: marks the present attribute at a place as no change of the user's.
    """

    module: nn.Module
    overlook: Callable[[tuple[str, str]], None]
    _own: dict[int, tuple[Stale, Any]] = attrs.field(factory=dict)
    _names: set[str] = attrs.field(factory=set)

    def hide(self, names: list[str]) -> None:
        """Replaces them by objects that raise an error."""
        for name in [name for name in names if name not in self._names]:
            self._names.add(name)
            path, _, key = name.rpartition(".")
            owner = self.module.get_submodule(path)
            if key in vars(owner) and not isinstance(vars(owner)[key], Stale):
                stale = Stale(
                    f"the attribute {name!r} of apply.module is not what a call has set: a call changes a copy of the module; "
                    "let forward return the value, (output, aux), and add it in the loss"
                )
                self._own[id(stale)] = stale, vars(owner)[key]
                owner.__dict__[key] = stale
                self.overlook((path, key))

    def undo(self, memo: dict[int, Any]) -> None:
        """Restores the original attributes in a deep copy of the module."""
        memo.update((place, copy.deepcopy(original, memo)) for place, (_, original) in self._own.items())


_NUMBERS = (bool, int, float, complex)
_PLAIN = (str, bytes, type, enum.Enum, types.ModuleType, np.generic, torch.dtype, torch.device, *_NUMBERS)


class Absent(enum.Enum):
    """Represents a missing attribute; a copy of it is itself."""

    ABSENT = 0


ABSENT = Absent.ABSENT


def put_attribute(into: dict[str, Any], key: str, value: Any) -> None:
    """Sets an entry; ``ABSENT`` removes it."""
    if value is ABSENT:
        into.pop(key, None)
    else:
        into[key] = value


def is_state(value: Any) -> bool:
    """Whether a state can store the value: tensors and numbers, alone or in lists, tuples and dicts."""
    return value is not ABSENT and all(  # a tensor with a graph is of this pass alone
        not leaf.requires_grad if isinstance(leaf, Tensor) else type(leaf) in _NUMBERS for leaf in tree.leaves(value)
    )


def is_mutable(value: Any) -> bool:
    """Whether an attribute is a tensor, or a structure of tensors and numbers, that a call may write into.

    >>> is_mutable((3, (1, 1))), is_mutable([3, 3]), is_mutable((3, [1, 1]))
    (False, True, True)
    """
    if _is_fixed(value) or not isinstance(value, (Tensor, list, tuple, dict, deque)):
        return False
    leaves = tree.leaves(value)
    return all(not (x.requires_grad or x.is_meta) if isinstance(x, Tensor) else type(x) in _NUMBERS for x in leaves)


def _is_fixed(value: Any) -> bool:
    """Whether it is a tuple of numbers, such as a shape or stride: a call may set another, but cannot write into it."""
    return type(value) in (tuple, torch.Size) and all(type(x) in _NUMBERS or _is_fixed(x) for x in value)


def has_graph(value: Any) -> bool:
    """Whether a value is, or contains, a tensor that gradients flow through, so that it is of one pass only."""
    todo, seen = [value], set()
    while todo:
        item = todo.pop()
        if isinstance(item, Tensor):
            if item.requires_grad:
                return True
        elif not isinstance(item, _PLAIN) and id(item) not in seen:
            seen.add(id(item))
            todo.extend(_inside(item))
    return False


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
    fields = getattr(value, "__dict__", None)
    if isinstance(fields, dict):
        yield from fields.values()


def kept(name: str, value: Any) -> Any:
    """What the next pass gets for a value that no state can store."""
    stale = Stale(
        f"the attribute {name!r} was computed, with a graph, in an earlier pass, whose graph is gone: keep what later passes "
        "read without one (.detach().clone()), and return from forward what the loss needs"
    )
    if not has_graph(value):
        return value
    return tree.map(lambda leaf: stale if has_graph(leaf) else leaf, value)


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A structure with copies of its containers, tensors and arrays, which a pass may write into; what is shared stays so."""
    if id(value) not in memo:
        if isinstance(value, Tensor):
            memo[id(value)] = usable(value.detach().clone(), {})
        elif isinstance(value, np.ndarray):
            memo[id(value)] = value.copy()
        elif tree.is_leaf(value):
            memo[id(value)] = value
        else:
            memo[id(value)] = tree.map(lambda item: copied(item, memo), value, is_leaf=lambda item: item is not value)
    return memo[id(value)]


def usable(value: Any, memo: dict[int, Any]) -> Any:
    """A structure with tensors that training may use, also if they were made in inference mode."""

    def one(leaf: Any) -> Any:
        if type(leaf) is OrderedDict:  # optree does not see what ``move_to_end`` does
            fresh = OrderedDict(leaf)
            return tree.map(one, fresh, is_leaf=lambda item: type(item) is OrderedDict and item is not fresh)
        if not isinstance(leaf, Tensor) or not leaf.is_inference():
            return leaf
        with torch.inference_mode(False):
            return memo.setdefault(id(leaf), leaf.clone())

    return tree.map(one, value, is_leaf=lambda item: type(item) is OrderedDict)
