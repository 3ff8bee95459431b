"""Describes values and functions as text that is the same on all ranks that run the same program."""

import functools
import types
import zlib
from collections.abc import Iterable
from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.comm.record.group import Group

_Known = dict[int, tuple[Any, str]]  # by id: the values, which keeps them alive, and their texts

_LONGEST = 2000  # characters of one value
_PLAIN = (bool, int, float, complex, str, bytes, range, type(None), torch.dtype, Enum)


def described(value: Any) -> str:
    """Describes a value as text that is the same on all ranks of a program, and differs if a number in it differs.

    A function is described by its name, code, defaults, closure variables and the module's numbers that it reads; a callable
    object by its type and numbers; a frozen attrs record by its fields; a group by its size; a device by its type; a tensor of
    several elements by its dtype. Other objects, such as files, modules and loaders, are described by their type, since they
    may differ between ranks.

    >>> def optimizer(lr):
    ...     return lambda params, grads: [p - lr * g for p, g in zip(params, grads)]
    >>> described(optimizer(0.1)) == described(optimizer(0.1)), described(optimizer(0.1)) == described(optimizer(0.2))
    (True, False)
    """
    return _described(value, {})


def _described(value: Any, known: _Known) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) not in known:
        known[id(value)] = value, "..."  # a reference to itself
        text = _contents(value, known)
        if len(text) > _LONGEST:  # parts that several values share would be repeated in each
            text = f"{text[:_LONGEST]}...[{zlib.crc32(text.encode()):08x}]"
        known[id(value)] = value, text
    return known[id(value)][1]


def _contents(value: Any, known: _Known) -> str:
    if isinstance(value, Group):
        return f"{value.size} ranks"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and value.device.type == "cpu" and type(value) is Tensor and not value.requires_grad
        return f"{value.dtype} {value.item() if is_number else 'tensor'}"
    if isinstance(value, dict):
        return _joined((f"{_described(k, known)}: {_described(v, known)}" for k, v in value.items()), "{}")
    if isinstance(value, (list, tuple)):
        return _joined((_described(item, known) for item in value), "()" if isinstance(value, tuple) else "[]")
    if attrs.has(type(value)) and type(value).__setattr__.__name__ == "_frozen_setattrs":  # mutable ones may differ by rank
        return _record(value, known)
    return _called(value, known)


def _joined(parts: Iterable[str], brackets: str) -> str:
    return f"{brackets[0]}{', '.join(parts)}{brackets[1]}"


def _record(value: Any, known: _Known) -> str:
    """Describes an attrs record by its constructor arguments, without fields with factories, which each rank fills itself."""
    given = [field for field in attrs.fields(type(value)) if field.init and not isinstance(field.default, attrs.Factory)]  # type: ignore[arg-type]
    parts = [f"{field.name}={_described(getattr(value, field.name), known)}" for field in given if field.name[0] != "_"]
    return f"{type(value).__qualname__}({', '.join(parts)})"


def _called(value: Any, known: _Known) -> str:
    if isinstance(value, functools.partial):
        return f"partial{_described((value.func, value.args, value.keywords), known)}"
    if isinstance(value, types.MethodType):
        return f"{_described(value.__self__, known)}.{value.__func__.__name__}"
    if isinstance(value, types.FunctionType):
        return _function(value, known)
    name = getattr(value, "__qualname__", None)  # of classes and builtins
    if isinstance(name, str):
        return name
    is_function = callable(value) and not isinstance(value, nn.Module)
    held = getattr(value, "__dict__", {}) if is_function else {}
    numbers = {name: number for name, number in held.items() if isinstance(number, int | float)}
    return f"{type(value).__qualname__}{_described(numbers, known) if numbers else ''}"


def _function(function: types.FunctionType, known: _Known) -> str:
    code = function.__code__
    names = {name: function.__globals__.get(name) for name in code.co_names}
    used: dict[str, Any] = {name: value for name, value in names.items() if isinstance(value, int | float)}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        used[name] = _content(cell)
    used["defaults"] = [function.__defaults__, function.__kwdefaults__]
    return f"{function.__qualname__}[{_digest(code):08x}]{_described(used, known)}"


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _digest(code: types.CodeType) -> int:
    """A CRC-32 of a function's code, independent of its file's path."""
    ordered = [sorted(map(repr, const)) if isinstance(const, frozenset) else const for const in code.co_consts]
    consts = [_digest(const) if isinstance(const, types.CodeType) else const for const in ordered]
    return zlib.crc32(repr((code.co_code, code.co_names, consts)).encode())
