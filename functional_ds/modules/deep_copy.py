"""Deep copies of modules whose functions and weak references refer to the copy."""

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from .module_places import joined

_ATOMS = (str, bytes, int, float, complex, type, types.ModuleType, Tensor)
_REBUILT = (tuple, types.MethodType, functools.partial)  # cannot be written into, so copies of them are made anew, too


Put = Callable[[Any], None]  # sets the value of one place: an item, an attribute, the cell of a closure


def _put_in_tuple(cls: type, items: list[Any], put: Put, index: int, value: Any) -> None:
    """Replaces a tuple, at its own place."""
    items[index] = value
    put(cls(*items) if hasattr(cls, "_fields") else cls(items))


def _put_arguments(owner: Any, value: Any) -> None:
    """Sets the defaults of a function, or the arguments of a partial one."""
    if isinstance(owner, functools.partial):
        owner.__setstate__((owner.func, value, owner.keywords, vars(owner)))  # type: ignore[attr-defined]
    else:
        owner.__defaults__ = value


def _put_nowhere(value: Any) -> None:
    """For what is only looked into."""


def fields_of(value: Any) -> dict[str, Any]:
    """An object's attributes, in its ``__dict__`` and in slots."""
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return {}
    slots = [name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
    slot_values = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    fields = getattr(value, "__dict__", None)
    return {**slot_values, **fields} if isinstance(fields, dict) else slot_values


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy(module, memo)``, in which closures, bound methods and weak references refer to the copy.

    ``copy.deepcopy`` keeps functions and weak references, so they would refer to the original. Other objects that a function
    refers to (such as the caller's dict, into which a hook writes) stay shared.

    Args:
        module: any.
        memo: copies by id of the original, as for ``copy.deepcopy``; it grows.

    Raises:
        TypeError: something in the module cannot be copied; names the attribute.
    """
    for holder in _holders_of_hooks(module):
        memo.setdefault(id(holder), holder)
    try:
        made = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, ValueError) as error:
        name, value = _culprit(module, memo)
        raise TypeError(
            f"fds.functional: {type(module).__name__} cannot be copied, because {name} is a {type(value).__name__}: {error}; "
            "make it in forward, or keep it outside of the module"
        ) from error
    rebinding = _Rebinding(memo, {id(value) for value in memo.values()})
    for owner in made.modules():
        rebinding.within(owner.__dict__)
    return made


def _holders_of_hooks(module: nn.Module) -> Iterator[Any]:
    """The caller's objects outside of the module whose methods are hooks, which stay shared.

    An object that refers to a part of the module is not one: the copy's hook must refer to the copy.
    """
    parts: set[int] | None = None
    for owner in module.modules():
        for hooks in [value for key, value in vars(owner).items() if key.endswith("_hooks") and isinstance(value, dict)]:
            for hook in hooks.values():
                holder = hook.__self__ if isinstance(hook, types.MethodType) else None
                if holder is None or isinstance(holder, (type, nn.Module)):
                    continue
                if parts is None:
                    parts = {id(x) for x in (*module.modules(), *module.parameters(), *module.buffers())}
                if not _leads_to(holder, parts, set()):
                    yield holder


def _leads_to(value: Any, parts: Collection[int], seen: set[int]) -> bool:
    if id(value) in parts:
        return True
    if id(value) in seen or isinstance(value, _ATOMS):
        return False
    seen.add(id(value))
    return any(_leads_to(item, parts, seen) for item in (*_inside(value), *fields_of(value).values()))


def reached(module: nn.Module, wanted: Collection[int], besides: Collection[str] = ()) -> list[tuple[int, Put]]:
    """The places other than ``_parameters`` and ``_buffers`` that hold one of the values: attributes, containers, closures.

    Args:
        module: any.
        wanted: the values' ids.
        besides: attributes that are not looked into.
    """
    search = _PlaceSearch(wanted, set(map(id, module.modules())))
    for path, owner in module.named_modules():
        for key, value in vars(owner).items():
            if key not in ("_parameters", "_buffers", "_modules") and joined(path, key) not in besides:
                search.visit(value, functools.partial(owner.__dict__.__setitem__, key))
    return search.places


def _culprit(module: nn.Module, memo: Mapping[int, Any]) -> tuple[str, Any]:
    """The attribute that cannot be copied."""
    for path, owner in module.named_modules():
        for key, value in vars(owner).items():
            if key == "_modules":
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except (TypeError, RuntimeError, ValueError):
                return f"the attribute {f'{path}.{key}' if path else key!r}", value
    return "one of its modules", module


def _inside(value: Any) -> Iterable[Any]:
    """What a value refers to that ``copy.deepcopy`` does not see, or that is in a closure's containers."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if type(value) is weakref.ref:
        return (value(),)
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, deque)) else ()


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


@attrs.define(eq=False)
class _Rebinding:
    """Makes references inside a copy refer to the copy.

    Attributes:
        memo: the copies by the ids of the originals.
        copies: their ids: what may be written into.
    """

    memo: Mapping[int, Any]
    copies: set[int]
    _done: dict[int, Any] = attrs.field(factory=dict)
    _kept: list[Any] = attrs.field(factory=list)  # what has its id in ``_done`` stays alive

    def within(self, held: Any) -> None:
        """Replaces the values of a dict or list of the copy."""
        places: Iterable[tuple[Any, Any]] = held.items() if isinstance(held, dict) else enumerate(held)
        for key, value in [*places]:
            new = self.of(value)
            if new is not value:
                held[key] = new

    def of(self, value: Any) -> Any:
        """The replacement of a value."""
        if isinstance(value, _ATOMS) and id(value) not in self.memo:
            return value
        if id(value) in self.memo and id(value) not in self.copies:
            return self.memo[id(value)]
        if id(value) not in self._done:
            self._done[id(value)] = value
            self._kept.append(value)
            if id(value) in self.copies:
                self._fill(value)
            if isinstance(value, _REBUILT) or id(value) not in self.copies:
                self._done[id(value)] = self._again(value) if self._leads_back(value, set()) else value
        return self._done[id(value)]

    def _fill(self, value: Any) -> None:
        """Continues inside a copy."""
        if isinstance(value, (dict, list, deque)):
            self.within(value)
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, types.MethodType):
            self.within(value.__dict__)

    def _leads_back(self, value: Any, seen: set[int]) -> bool:
        """Whether it refers to an original that has a copy."""
        if id(value) in self.memo and id(value) not in self.copies:
            return self.memo[id(value)] is not value
        if id(value) in seen or (id(value) in self.copies and not isinstance(value, _REBUILT)) or isinstance(value, _ATOMS):
            return False
        seen.add(id(value))
        return any(self._leads_back(item, seen) for item in _inside(value))

    def _again(self, value: Any) -> Any:
        """A version of a value that refers to the copy instead of the original."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(self.of(value.func), *map(self.of, value.args), **self._mapped(value.keywords))
        if type(value) is weakref.ref:
            return weakref.ref(self.of(value()))
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        made = copy.copy(value)
        self._fill(made)
        return made

    def _function(self, value: types.FunctionType) -> Callable[..., Any]:
        cells = value.__closure__ or ()
        leading = [_is_filled(cell) and self._leads_back(cell.cell_contents, set()) for cell in cells]
        closure = tuple(types.CellType() if leads else cell for cell, leads in zip(cells, leading, strict=True))
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, closure)
        self._done[id(value)] = made  # before its cells: it may refer to itself
        for cell, new, leads in zip(cells, closure, leading, strict=True):
            if leads:
                new.cell_contents = self.of(cell.cell_contents)
        made.__defaults__ = None if value.__defaults__ is None else tuple(map(self.of, value.__defaults__))
        made.__kwdefaults__ = None if value.__kwdefaults__ is None else self._mapped(value.__kwdefaults__)
        made.__dict__.update(self._mapped(vars(value)))
        made.__qualname__, made.__doc__, made.__module__ = value.__qualname__, value.__doc__, value.__module__
        return made

    def _mapped(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self.of(value) for key, value in values.items()}


@attrs.define(eq=False)
class _PlaceSearch:
    """Looks for values in places that may be set.

    Attributes:
        wanted: their ids.
        modules: the ids of the modules that are looked at by themselves.
        places: with the places.
    """

    wanted: Collection[int]
    modules: Collection[int]
    places: list[tuple[int, Put]] = attrs.field(factory=list)
    _seen: set[int] = attrs.field(factory=set)

    def visit(self, value: Any, put: Put) -> None:
        """Looks at a value and into it."""
        if id(value) in self.wanted:
            self.places.append((id(value), put))
            return
        if id(value) in self._seen or id(value) in self.modules or isinstance(value, _ATOMS):
            return
        if not isinstance(value, tuple):  # each place that a tuple has gets a new one
            self._seen.add(id(value))
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                if _is_filled(cell):
                    self.visit(cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
            self.visit(value.__defaults__, functools.partial(_put_arguments, value))
            self.visit(value.__kwdefaults__, _put_nowhere)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__, _put_nowhere)
        elif isinstance(value, functools.partial):
            self.visit(value.func, _put_nowhere)
            self.visit(value.args, functools.partial(_put_arguments, value))
            self.visit(value.keywords, _put_nowhere)
        elif isinstance(value, tuple):
            items = list(value)
            for index, item in enumerate(value):
                self.visit(item, functools.partial(_put_in_tuple, type(value), items, put, index))
        elif isinstance(value, (dict, list, deque)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self.visit(item, functools.partial(value.__setitem__, key))
        elif type(value) is not weakref.ref:
            for name, item in fields_of(value).items():  # frozen ones and slots, too
                self.visit(item, functools.partial(object.__setattr__, value, name))
