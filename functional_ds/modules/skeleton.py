"""A copy of a module without memory of its own, into which calls put parameters and buffers."""

import functools
from collections import deque
from collections.abc import Mapping
from operator import is_
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.torch_private import buffers_of, refresh_flat_weights, version_of
from functional_ds.step.buffers import Held, bit_equal

from .deep_copy import TensorPlace

__all__ = ["ABSENT", "Place", "Skeleton", "is_mutable", "joined", "put_attribute"]

Place = tuple[str, str]  # a module's path and an attribute
ABSENT = object()
_NUMBERS = (bool, int, float, complex)


@attrs.define(eq=False)
class Skeleton:
    """A copy of the module that has no memory of its own: calls put parameters and buffers into it.

    Attributes:
        owners: the modules in it, by path.
        slots: the places of each parameter.
        elsewhere: further places of buffers: attributes, lists, closures.
        tensors: the names of attributes that are tensors, or lists and the like of them, and no buffers.
        version: up to which change of ``Apply.module`` its attributes are those of that module.
        attributes: each module's own attributes when it was leased; what a call changes is taken back at the end.
        tried: whether it ran without values.
        identity: of the parameters that it has.
        calls: who runs the modules inside of it.
    """

    module: nn.Module
    owners: dict[str, nn.Module]
    names: Mapping[Place, str]
    places: Mapping[str, list[Place]]
    slots: dict[str, list[tuple[TensorPlace, Any]]]
    elsewhere: dict[str, list[tuple[TensorPlace, Any]]]
    rnns: list[nn.RNNBase]
    version: int
    tensors: list[str]
    attributes: list[dict[str, Any]] = attrs.field(factory=list)
    tried: bool = False
    identity: tuple[int, ...] = ()
    calls: tuple[Any, ...] = ()
    bound: Mapping[str, Tensor] = attrs.field(factory=dict)
    _plain: list[tuple[nn.Module, Any]] = attrs.field(factory=list)  # the modules that ``calls`` run, and their own forward
    _copies: dict[str, tuple[Any, Any, list[Any]]] = attrs.field(factory=dict)  # with their structure, leaves and versions
    _stores: dict[str, dict[str, Any]] = attrs.field(init=False)  # where each module has its buffers
    _shared: list[dict[str, Any]] = attrs.field(init=False)  # what it had there by itself

    @_stores.default
    def _stores_of_owners(self) -> dict[str, dict[str, Any]]:
        return {path: buffers_of(owner) for path, owner in self.owners.items()}

    @_shared.default
    def _own_buffers(self) -> list[dict[str, Any]]:
        return [dict(store) for store in self._stores.values()]

    def bind(self, params: Mapping[str, Tensor]) -> None:
        """Puts the parameters in place, wherever they belong."""
        for name, parameter in params.items():
            for owner, key in self.slots[name]:
                owner[key] = parameter
        for rnn in self.rnns:  # these read their weights from a second list
            refresh_flat_weights(rnn)
        self.bound = params
        self.identity = tuple(map(id, params.values()))

    def put(self, held: Held) -> None:
        """Lets the modules have these buffers."""
        for name, buffer in held.values.items():
            for path, key in self.places.get(name) or [_parted(name)]:
                store = self._stores.get(path)
                if store is not None and store.get(key, ABSENT) is not buffer:
                    store[key] = buffer
        for name, places in self.elsewhere.items():
            for holder, where in places:
                holder[where] = held.values[name]

    def note(self, held: Held) -> list[str]:
        """Takes over the buffers that a call has set anew, and gives their names."""
        assigned = []
        for path, store in self._stores.items():
            for key, buffer in store.items():
                name = self.names.get((path, key)) or joined(path, key)
                if held.values.get(name) is not buffer:
                    held.values[name] = store[key] = _usable(buffer)
                    assigned.append(name)
        return assigned

    def lease(self, held: Held) -> None:
        """Remembers the attributes that the module has by itself; tensors among them may be written, and are copied."""
        self.attributes = [dict(vars(owner)) for owner in self.owners.values()]
        self._copies = {}
        memo: dict[int, Any] = {}  # modules may share a dict
        for name in (*self.tensors, *(name for name in held.attributes if name not in self.tensors)):
            path, key = _parted(name)
            owner = self.owners.get(path)
            if owner is not None:
                value = held.attributes.get(name, vars(owner).get(key))
                if id(value) not in memo:
                    memo[id(value)] = tree.map(_copied, value)
                owner.__dict__[key] = copied = memo[id(value)]
                self._copies[name] = copied, tree.structure(copied), _versioned(copied)

    def _has_written(self, name: str, value: Any, before: Any, held: Held) -> bool:
        """Whether calls have set an attribute, or written into its tensors."""
        copied, structure, versions = self._copies.get(name, (None, None, []))
        if name in held.attributes or value is not copied or tree.structure(value) != structure:
            return True
        if any(one is not other or v != w for (one, v), (other, w) in zip(_versioned(value), versions, strict=True)):
            return True
        leaves = [x for x in tree.leaves(value) if isinstance(x, Tensor)]
        return held.looks and not all(map(bit_equal, leaves, [x for x in tree.leaves(before) if isinstance(x, Tensor)]))

    def settle(self, held: Held | None) -> None:
        """Takes back what calls have set: tensors and numbers go to ``held``, anything else is forgotten."""
        memo: dict[int, Any] = {}
        for (path, owner), before in zip(self.owners.items(), self.attributes, strict=True):
            now = vars(owner)
            if len(now) == len(before) and all(map(is_, now.values(), before.values())):
                continue
            for key in [key for key in {**now, **before} if now.get(key, ABSENT) is not before.get(key, ABSENT)]:
                name, value = joined(path, key), now.get(key, ABSENT)
                if self.elsewhere and held is not None and any(value is held.values.get(each) for each in self.elsewhere):
                    pass  # a buffer, under another name
                elif held is not None and _is_state(key, value) and self._has_written(name, value, before.get(key), held):
                    held.attributes[name] = memo.setdefault(id(value), tree.map(_usable, value))
                put_attribute(now, key, before.get(key, ABSENT))
        for store, buffers in zip(self._stores.values(), self._shared, strict=True):
            if store or buffers:
                store.clear()
                store.update(buffers)

    def divert(self, calls: tuple[Any, ...]) -> None:
        """Lets each of ``calls`` run the modules that it chooses, the last outermost. They are this copy's, not the user's."""
        if calls == self.calls:
            return
        for module, own in reversed(self._plain):
            put_attribute(module.__dict__, "forward", own)
        self._plain, self.calls = [], calls
        for call in calls:
            for path in call.chosen(self.module):
                module = self.module.get_submodule(path)
                self._plain.append((module, module.__dict__.get("forward", ABSENT)))
                module.__dict__["forward"] = functools.partial(call.run, path, module.forward)


def put_attribute(into: dict[str, Any], key: str, value: Any) -> None:
    """``ABSENT`` takes the entry away."""
    if value is ABSENT:
        into.pop(key, None)
    else:
        into[key] = value


def _parted(name: str) -> Place:
    path, _, key = name.rpartition(".")
    return path, key


def _is_state(key: str, value: Any) -> bool:
    """Whether an attribute is what a state can hold: tensors and numbers, alone or in lists, tuples and dicts."""
    if value is ABSENT or key in ("training", "forward"):
        return False
    return all(  # a tensor with a graph is of this pass alone
        not leaf.requires_grad if isinstance(leaf, Tensor) else type(leaf) in _NUMBERS for leaf in tree.leaves(value)
    )


def is_mutable(value: Any) -> bool:
    """Whether an attribute is a tensor, or a structure of tensors and numbers, that a call may write into."""
    return isinstance(value, (Tensor, list, tuple, dict, deque)) and all(
        not (x.requires_grad or x.is_meta) if isinstance(x, Tensor) else type(x) in _NUMBERS for x in tree.leaves(value)
    )


def _versioned(value: Any) -> list[tuple[Any, int]]:
    return [(leaf, version_of(leaf) if isinstance(leaf, Tensor) else 0) for leaf in tree.leaves(value)]


def _copied(leaf: Any) -> Any:
    return _usable(leaf.detach().clone()) if isinstance(leaf, Tensor) else leaf


def joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _usable(buffer: Any) -> Any:
    """A tensor that training may use, whatever mode it was made in; anything else as it is."""
    if not isinstance(buffer, Tensor) or not buffer.is_inference():
        return buffer
    with torch.inference_mode(False):
        return buffer.clone()
