"""Restores, for a function's second run, the state of its modules and arguments in the first."""

import copy
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.torch_private import buffers_of, disable_dispatch_modes, is_fake, parameters_of, version_of
from functional_ds.base.tree import setting
from functional_ds.comm.worlds.current import recorder

_SHARED = (Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)
_CONTAINERS = (list, tuple, dict, set, deque)


def snapshot(values: list[Any]) -> list[Any]:
    """Copies of objects and of the containers and objects inside; tensors, modules and functions are not copied.

    ``transformers.DynamicCache`` appends to lists and sets attributes, so a layer that runs again needs it as it was. Tensors
    that are written in place are not copied.
    """
    memo: dict[int, Any] = {}
    return [_object_copied(value, memo) for value in values]


def _object_copied(value: Any, memo: dict[int, Any]) -> Any:
    plain = type(value) in _CONTAINERS
    if isinstance(value, _SHARED) or not (plain or hasattr(value, "__dict__")):
        return value
    if id(value) not in memo:
        try:
            memo[id(value)] = made = copy.copy(value)
        except (TypeError, AttributeError, ValueError):  # it cannot be copied, so it stays as the first run leaves it
            return memo.setdefault(id(value), value)
        if isinstance(made, dict):
            made.update({key: _object_copied(item, memo) for key, item in made.items()})
        elif isinstance(value, deque):
            memo[id(value)] = deque((_object_copied(item, memo) for item in value), value.maxlen)
        elif plain:
            memo[id(value)] = type(value)(_object_copied(item, memo) for item in value)
        if not plain:
            vars(made).update({key: _object_copied(item, memo) for key, item in vars(value).items()})
    return memo[id(value)]


_SMALL = 1 << 16  # bytes of a buffer whose copy stays without a look at what was written, which would wait for a device
_PLAIN = (type(None), bool, int, float, complex, str)  # attributes that describe what modules' buffers hold
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_ABSENT = object()


@attrs.frozen(eq=False)
class _Had:
    """One module's parameters, buffers and plain attributes. ``_ABSENT`` marks what the call made.

    Parameters may be replaced by then: ``torch.func.functional_call`` sets others for a call.
    """

    params: Mapping[str, Any]
    buffers: Mapping[str, Any]
    attributes: Mapping[str, Any]


@attrs.define(eq=False)
class Rewind:
    """The state, before a call, of a module and its submodules, by path."""

    _had: dict[str, _Had] = attrs.field(factory=dict)
    _copies: list[Tensor] = attrs.field(factory=list)  # those of its buffers that are no longer the modules' own

    @contextmanager
    def once(self, module: nn.Module) -> Iterator[None]:
        """The call itself. Afterwards there are copies of small buffers, and of large ones that it wrote into.

        Writes are detected by versions and bits: ``x.data`` and the kernels of norms do not change versions.
        """
        owners = [
            (path, owner, dict(parameters_of(owner)), dict(buffers_of(owner)), set(vars(owner)), _plain(owner))
            for path, owner in module.named_modules()
        ]
        every = {id(b): b for _, _, _, buffers, _, _ in owners for b in buffers.values() if b is not None}
        copies, versions = _copies(every.values()), {key: version_of(b) for key, b in every.items()}
        try:
            yield
        finally:
            traced = recorder().records  # into a graph, which omits unread copies
            written = {key for key, b in every.items() if traced or _is_small(b) or version_of(b) != versions[key]}
            written |= _other_bits([(b, copies[key]) for key, b in every.items() if key not in written])
            self._copies = [copies[key] for key in written]
            for path, owner, params, buffers, names, plain in owners:
                had = {name: copies[id(b)] if id(b) in written else b for name, b in buffers.items()}
                made = dict.fromkeys((name for name in buffers_of(owner) if name not in buffers), _ABSENT)
                self._had[path] = _Had(params, {**had, **made}, {**plain, **dict.fromkeys(set(vars(owner)) - names, _ABSENT)})

    @contextmanager
    def again(self, module: nn.Module) -> Iterator[None]:
        """The call again, perhaps of another copy of the module, whose present state is restored afterwards."""
        further, inner = _copies(self._copies), dict(module.named_modules())
        owners = [(inner[path], had) for path, had in self._had.items() if path in inner]
        now = []
        for owner, had in owners:
            buffers = {name: further.get(id(buffer), buffer) for name, buffer in had.buffers.items()}
            put = _put(parameters_of(owner), had.params), _put(buffers_of(owner), buffers)
            now.append((owner, *put, _put(owner.__dict__, _copied(had.attributes))))
        try:
            yield
        finally:
            for owner, params, buffers, attributes in now:
                _put(parameters_of(owner), params)
                _put(buffers_of(owner), buffers)
                _put(owner.__dict__, attributes)


def _put(into: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Puts values into a module's own dict; returns the previous ones."""
    before = {name: into.get(name, _ABSENT) for name in values}
    for name, value in values.items():
        if value is _ABSENT:
            into.pop(name, None)
        else:
            into[name] = value
    return before


def _plain(owner: nn.Module) -> dict[str, Any]:
    return _copied({name: value for name, value in vars(owner).items() if name not in _OF_MODULES and _is_plain(value)})


def _is_plain(value: Any) -> bool:
    """Whether an attribute is plain, a tensor without a graph, or a structure of such."""
    if not isinstance(value, (*_PLAIN, Tensor, list, tuple, dict, deque)):
        return False
    return all(not x.requires_grad if isinstance(x, Tensor) else type(x) in _PLAIN for x in tree.leaves(value))


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """With copies of structures and small tensors: a call may write into them."""
    with recorder().unseen():
        return {
            name: tree.map(lambda x: _copy(x) if isinstance(x, Tensor) and _is_small(x) else x, value)
            for name, value in attributes.items()
        }


def _is_small(buffer: Tensor) -> bool:
    return (
        buffer.layout == torch.strided and buffer.nbytes <= _SMALL and not buffer.requires_grad
    )  # a copy would not be a part of the graph


def _copies(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """By id; no recorder records them as a part of the function."""
    with recorder().unseen():
        return {id(tensor): _copy(tensor) for tensor in tensors}


def _copy(tensor: Tensor) -> Tensor:
    """A copy; if a step is traced, tensors with values are not part of the graph and are kept."""
    return tensor if recorder().records and not is_fake(tensor) else tensor.detach().clone()


def _other_bits(pairs: Iterable[tuple[Tensor, Tensor]]) -> set[int]:
    """The ids of tensors whose bits differ from their copies'; all are compared before the first result is awaited."""
    with disable_dispatch_modes():
        answers = [(id(tensor), _differs(tensor.detach(), copy)) for tensor, copy in pairs]
        return {key for key, answer in answers if answer}


def _differs(tensor: Tensor, copy: Tensor) -> Tensor | bool:
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
        return True
    if tensor.layout != torch.strided or tensor.is_meta:
        return False  # their versions tell
    one, other = (x.reshape(-1).view(torch.uint8) for x in (tensor, copy))
    return (one != other).any()


@attrs.define(eq=False)
class ModuleCalls:
    """The calls of modules inside a region: later runs restore the modules' state in the first.

    Attributes:
        reruns: whether there are later runs.
    """

    reruns: bool
    _snapshots: list[Rewind] = attrs.field(factory=list)  # one for each call, in order
    _left: Iterator[Rewind] | None = None  # those that this run has not reached yet; None in the first run
    _inside: frozenset[nn.Module] = frozenset()  # the modules that are being called, and their submodules

    def rewound(self) -> AbstractContextManager[None]:
        """A later run, perhaps in the middle of the first, for a backward pass inside the function."""
        return setting(self, _left=iter(self._snapshots), _inside=frozenset())

    @contextmanager
    def calling(self, module: nn.Module) -> Iterator[None]:
        """A call of a module."""
        if not self.reruns or module in self._inside:
            yield
            return
        with setting(self, _inside=self._inside.union(module.modules())), self._snapshot(module):
            yield

    def _snapshot(self, module: nn.Module) -> AbstractContextManager[None]:
        if self._left is None:
            self._snapshots.append(Rewind())
            return self._snapshots[-1].once(module)
        rewind = next(self._left, None)
        return nullcontext() if rewind is None else rewind.again(module)
