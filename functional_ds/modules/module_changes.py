"""Changes of ``apply.module``: noticed at the next call, and applied to its copies or rejected."""

import array
import copy
import functools
import itertools
import types
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import attrs
import numpy as np
from torch import Tensor, nn

from functional_ds.base.torch_private import version_of

from .attributes import ABSENT, put_attribute
from .deep_copy import fields_of
from .module_places import Place, joined

_TENSORS = ("_parameters", "_buffers")
_STRUCTURE = (*_TENSORS, "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PASSED_OVER = frozenset(vars(nn.Module())) - {"training", *_STRUCTURE}  # no call depends on it, or it changes with hooks
_SIMPLE = (str, bytes, bool, int, float, complex, type(None))
_ATOMS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


class BareParameter(nn.Parameter):
    """A parameter without values, whose ``data`` shares its version counter, so that writes into that are noticed."""

    @property
    def data(self) -> Tensor:
        """The parameter without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


_EQUAL_IS_SAME = (
    str,
    type(None),
    dict,
    set,
    nn.Module,
    BareParameter,
    types.FunctionType,
)  # equality is too weak for others: 1 == True


@attrs.frozen
class _Change:
    """A change of a module.

    Attributes:
        name: of the attribute or the buffer.
        place: the attribute.
        value: its new value.
        plain: whether a copy of the module can apply it; else copies are made again.
    """

    name: str
    place: Place
    value: Any
    plain: bool


class ModuleChanges:
    """Changes of a module and its submodules since it was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._now = module, _Snapshot.of(module)
        self._made: list[_Change] = []
        self._seen, self._edits = 0, 0  # how many of these the last ``notice`` knew, and how many matter besides modes

    @property
    def modes(self) -> tuple[int, ...]:
        """Which modules are in training mode, and the number of other changes except of buffers' tensors."""
        return (*[owner.training for owner in self._now.owners.values()], self._edits)

    def __len__(self) -> int:
        """The number of changes so far."""
        return len(self._made)

    def since(self, version: int) -> set[str]:
        """The names of the attributes and buffers of all but the first ``version`` changes."""
        return {change.name for change in self._made[version:]}

    def notice(self) -> bool:
        """Checks for changes since the last call; returns whether copies must be made again.

        Raises:
            RuntimeError: a parameter was replaced, added, removed, frozen or written.
        """
        if not self._now.is_current():
            self._look()
        seen, self._seen = self._seen, len(self._made)
        return seen != self._seen and not all(change.plain for change in self._made[seen:])

    def overlook(self, place: Place) -> None:
        """Accepts the present attribute at a place as unchanged."""
        self._look(place)

    def bring(self, owners: Sequence[nn.Module], version: int) -> int | None:
        """Applies all but the first ``version`` changes to a copy, whose modules are in the same order; returns their number.

        None if only a new copy can have them.
        """
        changes = self._made[version:]
        if not all(change.plain for change in changes):
            return None
        order = {path: index for index, path in enumerate(self._now.owners)} if changes else {}
        for change in changes:
            path, key = change.place
            if key != "_buffers":
                put_attribute(owners[order[path]].__dict__, key, change.value)
        return len(self._made)

    def _look(self, passed_over: Place | None = None) -> None:
        before, after = self._now, _Snapshot.of(self._module)
        written = _written_parameter(before, after)
        self._now = after
        for place in {**before.marks, **after.marks}:
            if place != passed_over and before.marks.get(place) != after.marks.get(place):
                self._note(place, before, after)
        if written is not None:  # raised once: the write itself has changed nothing
            raise RuntimeError(
                f"the parameter {written!r} of apply.module was written, and has no values there: a step's params are in its "
                "state. Write it before fds.functional, or change params in a transform: fds.wrap(..., update=...)"
            )

    def _note(self, place: Place, before: "_Snapshot", after: "_Snapshot") -> None:
        (path, key), was, now = place, before.marks.get(place), after.marks.get(place)
        if key != "_buffers":
            value = vars(after.owners[path]).get(key, ABSENT) if path in after.owners else ABSENT
            plain = path in after.owners and all(type(mark) is int or mark is None for mark in (was, now))
            self._made.append(_Change(joined(path, key), place, value, plain))
            self._edits += key != "training"
            return
        was, now = was or {}, now or {}
        for name in [name for name in {**was, **now} if was.get(name) != now.get(name)]:
            plain = name in was and name in now and was[name][0] == now[name][0]
            self._made.append(_Change(joined(path, name), place, None, plain))
        self._edits += was.keys() != now.keys()


@attrs.define(eq=False)
class _Snapshot:
    """What a module consists of at one moment, down to the items of its containers and the attributes of its objects.

    Attributes:
        owners: the modules by path.
        marks: for each attribute of a module a mark that differs once it, or anything in it, changes. That of a number or text
            is an int; those of parameters and buffers are by name.
    """

    owners: dict[str, nn.Module]
    marks: dict[Place, Any] = attrs.field(factory=dict)
    _vars: list[dict[str, Any]] = attrs.field(factory=list)  # of modules
    _dicts: list[dict[Any, Any]] = attrs.field(factory=list)  # others
    _sequences: list[Any] = attrs.field(factory=list)
    _tensors: list[Tensor] = attrs.field(factory=list)
    _arrays: list[Any] = attrs.field(factory=list)  # NumPy's and Python's
    _objects: list[Any] = attrs.field(factory=list)  # whose class may be set
    _known: dict[int, Any] = attrs.field(factory=dict)  # the marks of what was looked at, by ids
    _listed: list[dict[Any, Any]] = attrs.field(init=False)
    _before: tuple[list[Any], list[Any], list[Any]] = attrs.field(init=False)
    _strict: list[int] = attrs.field(init=False)

    @staticmethod
    def of(module: nn.Module) -> "_Snapshot":
        """The snapshot of a module."""
        snapshot = _Snapshot(dict(module.named_modules()))
        snapshot._known.update((id(owner), (id(owner),)) for owner in snapshot.owners.values())
        for path, owner in snapshot.owners.items():
            snapshot._objects.append(owner)
            snapshot.marks[path, "__class__"] = (id(type(owner)),)
            snapshot._vars.append(vars(owner))
            for key, value in vars(owner).items():
                scripted = key in _STRUCTURE and not isinstance(value, dict)  # scripted modules keep theirs
                if key not in _PASSED_OVER and not scripted:
                    snapshot.marks[path, key] = snapshot._tensors_of(value) if key in _TENSORS else snapshot._mark(value)
        snapshot._listed = [*snapshot._vars, *(fields for fields in snapshot._dicts if fields)]
        values = snapshot._values()
        snapshot._strict = [place for place, value in enumerate(values) if not isinstance(value, _EQUAL_IS_SAME)]
        snapshot._before = values, [values[place] for place in snapshot._strict], snapshot._counts()
        return snapshot

    def is_current(self) -> bool:
        """Whether the module is unchanged. Compares flat lists, which costs little more than making them."""
        values, strict, counts = self._before
        try:
            now = self._values()
            same = now == values and all(map(is_, [now[place] for place in self._strict], strict))  # the same object is equal
            return same and self._counts() == counts
        except Exception:  # what cannot be compared, such as tensors of many elements, is not the same
            return False

    def _values(self) -> list[Any]:
        of_sequences = itertools.chain.from_iterable(self._sequences)
        return [*itertools.chain.from_iterable(map(dict.values, self._listed)), *of_sequences]

    def _counts(self) -> list[Any]:
        """What values do not say: a new key is the last one."""
        return [
            *map(next, map(reversed, self._listed)),
            *map(len, self._dicts),
            *map(len, self._sequences),
            *map(version_of, self._tensors),
            *[tensor.requires_grad for tensor in self._tensors],
            *map(_checksum, self._arrays),
            *map(type, self._objects),
        ]

    def _tensors_of(self, held: Any) -> Any:
        self._dicts.append(held)
        return {name: self._mark(tensor) for name, tensor in held.items() if tensor is not None}

    def _mark(self, value: Any) -> Any:
        if isinstance(value, _SIMPLE):
            return id(value)
        if id(value) not in self._known:
            self._known[id(value)] = (id(value),)  # reference cycles
            self._known[id(value)] = (id(value), *self._inside(value))
        return self._known[id(value)]

    def _inside(self, value: Any) -> Iterator[Any]:
        """A mark that differs if a value changes."""
        if isinstance(value, Tensor):
            if not value.is_inference():
                self._tensors.append(value)
                yield from (version_of(value), value.requires_grad)
        elif isinstance(value, (np.ndarray, bytearray, array.array)):
            self._arrays.append(value)
            yield _checksum(value)
        elif isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            if isinstance(value, dict):
                self._dicts.append(value)
                yield from map(id, value)
            else:
                self._sequences.append(value)
            yield from map(self._mark, [*(value.values() if isinstance(value, dict) else value)])
        elif isinstance(value, (types.MethodType, functools.partial)):
            yield from map(
                self._mark,
                value.__reduce__()[1] if isinstance(value, types.MethodType) else (value.func, value.args, value.keywords),
            )
        elif not isinstance(value, _ATOMS) and not _is_shared(value):
            self._objects.append(value)
            yield id(type(value))
            yield from self._fields(value)

    def _fields(self, value: Any) -> Iterator[Any]:
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict):
            self._dicts.append(fields)
        attributes = fields_of(value)
        if attributes and attributes != fields:
            self._sequences.append(_SlotValues(value))
        for key, attribute in attributes.items():
            yield key
            yield self._mark(attribute)


@attrs.frozen(eq=False)
class _SlotValues:
    """The attributes of an object with slots, read on demand."""

    owner: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(fields_of(self.owner).values())

    def __len__(self) -> int:
        return len(fields_of(self.owner))


def _checksum(value: Any) -> int:
    return zlib.crc32(value if isinstance(value, bytearray) else value.tobytes())


def _is_shared(value: Any) -> bool:
    """Whether the module and its copies have one and the same object."""
    if not hasattr(type(value), "__deepcopy__"):
        return False
    try:
        return copy.deepcopy(value) is value
    except Exception:  # a copy of the module says why
        return True


def _written_parameter(before: _Snapshot, after: _Snapshot) -> str | None:
    """The name of a parameter that was written.

    Raises:
        RuntimeError: one was replaced, added, removed, or frozen.
    """
    was, now = (
        {
            joined(path, name): mark
            for (path, key), held in snapshot.marks.items()
            if key == "_parameters"
            for name, mark in held.items()
        }
        for snapshot in (before, after)
    )
    for name in {**was, **now}:
        if was.get(name, [None])[0] != now.get(name, [None])[0]:
            raise RuntimeError(
                f"the parameter {name!r} of apply.module was replaced, added or removed, and a step trains the params that "
                "fds.functional gave: change the module before fds.functional, call it again, and then step.init"
            )
        if was[name][2] != now[name][2]:
            raise RuntimeError(
                f"requires_grad of the parameter {name!r} of apply.module was changed, and a step trains the same params "
                "throughout: set it before fds.functional, or train parts by steps of their own (fds.freeze)"
            )
    return next((name for name in now if was[name] != now[name]), None)
