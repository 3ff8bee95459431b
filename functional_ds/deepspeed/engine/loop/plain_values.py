"""Values stored with a state, as JSON: numbers, strings, containers, tensors, arrays; other objects are pickled."""

import base64
import io
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import PosixPath
from pickle import PicklingError
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from functional_ds.state_dict.errors import CheckpointError, DamagedError

_KIND = "__kind__"  # marks values that JSON cannot represent
_SIMPLE = (str, int, float, bool, type(None))


def encoded(value: Any) -> Any:
    """The value as JSON. Tensors are copied to the CPU.

    Law: ``decoded(encoded(x)) = x``, with the same types.

    Raises:
        ValueError: it contains itself, or is nested too deeply; an object in it cannot be pickled.

    >>> encoded({"epoch": 3, "milestones": Counter({4: 1})})
    {'epoch': 3, 'milestones': {'__kind__': 'Counter', 'items': [[4, 1]]}}
    """
    try:
        return _encoded(value)
    except RecursionError:
        raise ValueError("what is saved with the state is nested too deeply, or contains itself") from None


def _encoded(value: Any) -> Any:
    if type(value) in _SIMPLE:
        return value
    if type(value) is list:
        return [_encoded(item) for item in value]
    if type(value) is dict and _KIND not in value and all(type(name) is str for name in value):
        return {name: _encoded(item) for name, item in value.items()}
    for tag, (is_one, parts, _) in _KINDS.items():
        if is_one(value):
            return {_KIND: tag, **parts(value)}
    held, tag = io.BytesIO(), f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        torch.save(value, held)
    except (AttributeError, TypeError, PicklingError) as error:
        raise ValueError(f"a {tag} cannot be saved: {error}; keep plain values, tensors and arrays") from error
    return {_KIND: "pickle", "type": tag, "data": _text(held.getvalue())}


def pickled_paths(data: Any, name: str) -> list[str]:
    """The places of pickled objects in what ``encoded`` made, each with its class.

    >>> pickled_paths({"a": [encoded(ValueError())]}, "client_state")
    ["client_state['a'][0], a builtins.ValueError"]
    """
    if isinstance(data, list):
        return [path for index, item in enumerate(data) for path in pickled_paths(item, f"{name}[{index}]")]
    if not isinstance(data, dict):
        return []
    if data.get(_KIND) == "pickle":
        return [f"{name}, a {data.get('type')}"]
    rest = data.get("items", data.get("vars", [])) if _KIND in data else data
    if isinstance(rest, dict):
        return [path for key, item in rest.items() for path in pickled_paths(item, f"{name}[{key!r}]")]
    return pickled_paths(rest, name)


def decoded(data: Any, *, name: str, allow_pickle: bool) -> Any:
    """The inverse of ``encoded``. Its code does not run, unless ``allow_pickle`` allows it.

    Args:
        data: the JSON.
        name: what to call it in errors.
        allow_pickle: whether to unpickle objects.

    Raises:
        CheckpointError: it has pickled objects, and ``allow_pickle`` is False.
        DamagedError: it is not from ``encoded``.
    """
    pickled = pickled_paths(data, name)
    if pickled and not allow_pickle:
        raise CheckpointError(
            "load_checkpoint: the folder has pickled objects, and to unpickle them can run any code: "
            f"{', '.join(pickled)}; pass allow_pickle=True if you trust whoever wrote the folder, or save plain values, "
            "tensors and arrays"
        )
    try:
        return _decoded(data)
    except (ValueError, TypeError, KeyError, RuntimeError, RecursionError) as error:
        raise DamagedError(f"{name} is not what an engine saves: {type(error).__name__}: {error}") from error


def _decoded(data: Any) -> Any:
    if isinstance(data, list):
        return [_decoded(item) for item in data]
    if not isinstance(data, dict):
        return data
    if _KIND not in data:
        return {name: _decoded(item) for name, item in data.items()}
    if data[_KIND] == "pickle":
        return torch.load(io.BytesIO(_bytes(data)), map_location="cpu", weights_only=False)
    return _KINDS[data[_KIND]][2](data)


# -- kinds of values: whether a value is one, its parts as JSON, and the value of these -------------------------------------


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(data: Mapping[str, Any]) -> bytes:
    return base64.b64decode(data["data"], validate=True)


def _pairs(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {"items": [[_encoded(key), _encoded(item)] for key, item in value.items()]}


def _items(value: Any) -> dict[str, Any]:
    return {"items": [_encoded(item) for item in value]}


def _vars(value: Any) -> dict[str, Any]:
    return {"vars": {name: _encoded(item) for name, item in vars(value).items()}}


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _tensor_parts(value: Tensor) -> dict[str, Any]:
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "grad": value.requires_grad, "data": _text(data)}


def _tensor(data: Mapping[str, Any]) -> Tensor:
    held, dtype = _bytes(data), _dtype(data["dtype"])
    flat = torch.frombuffer(bytearray(held), dtype=dtype) if held else torch.empty(0, dtype=dtype)
    return flat.view(data["shape"]).requires_grad_(bool(data["grad"]))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return dtype


def _is_array(value: Any) -> bool:
    return (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biufc"


def _array_parts(value: Any) -> dict[str, Any]:
    return {"dtype": value.dtype.str, "shape": list(value.shape), "data": _text(value.tobytes())}


def _array(data: Mapping[str, Any]) -> Any:
    return np.frombuffer(_bytes(data), dtype=np.dtype(data["dtype"])).reshape(data["shape"]).copy()


def _dict(data: Mapping[str, Any]) -> dict[Any, Any]:
    return {_decoded(key): _decoded(value) for key, value in data["items"]}


_Kind = tuple[Callable[[Any], bool], Callable[[Any], dict[str, Any]], Callable[[Mapping[str, Any]], Any]]
_KINDS: Mapping[str, _Kind] = {
    "dict": (_is(dict), _pairs, _dict),
    "OrderedDict": (_is(OrderedDict), _pairs, lambda data: OrderedDict(_dict(data))),
    "Counter": (_is(Counter), _pairs, lambda data: Counter(_dict(data))),
    "tuple": (_is(tuple), _items, lambda data: tuple(map(_decoded, data["items"]))),
    "set": (_is(set), _items, lambda data: set(map(_decoded, data["items"]))),
    "frozenset": (_is(frozenset), _items, lambda data: frozenset(map(_decoded, data["items"]))),
    "Size": (_is(torch.Size), _items, lambda data: torch.Size(data["items"])),
    "Namespace": (_is(Namespace), _vars, lambda data: Namespace(**_decoded(data["vars"]))),
    "SimpleNamespace": (_is(SimpleNamespace), _vars, lambda data: SimpleNamespace(**_decoded(data["vars"]))),
    "bytes": (_is(bytes), lambda value: {"data": _text(value)}, _bytes),
    "complex": (_is(complex), lambda value: {"items": [value.real, value.imag]}, lambda data: complex(*data["items"])),
    "path": (_is(PosixPath), lambda value: {"data": str(value)}, lambda data: PosixPath(data["data"])),
    "dtype": (_is(torch.dtype), lambda value: {"data": str(value)[6:]}, lambda data: _dtype(data["data"])),
    "device": (_is(torch.device), lambda value: {"data": str(value)}, lambda data: torch.device(data["data"])),
    "parameter": (_is(nn.Parameter), _tensor_parts, lambda data: nn.Parameter(_tensor(data), requires_grad=data["grad"])),
    "tensor": (
        lambda value: type(value) is Tensor and value.layout is torch.strided and not value.is_quantized,
        _tensor_parts,
        _tensor,
    ),
    "number": (lambda value: isinstance(value, np.generic) and _is_array(value), _array_parts, lambda data: _array(data)[()]),
    "array": (_is_array, _array_parts, _array),
}
