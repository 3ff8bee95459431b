"""Skeletons: copies of a module without memory, into which calls put parameters and buffers."""

import functools
import gc
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

import attrs
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.torch_private import buffers_of, held_elsewhere, parameters_of, refresh_flat_weights, version_of
from functional_ds.step.state.buffer_scope import ModuleValues, bit_equal
from functional_ds.step.state.buffers import AttributePath, OtherAttribute, parts_of

from .attributes import ABSENT, Stale, copied, has_graph, is_state, kept, put_attribute, usable
from .deep_copy import Put
from .module_changes import ModuleChanges
from .module_places import Place, joined, parted
from .refusals import refuse_flags
from .shared_memory import Noted, is_written, noted, shared_paths


class RunBy(functools.partial[Any]):
    """The forward of a module that one of ``Skeleton.calls`` runs: ``call.run(path, forward, *args, **kwargs)``."""

    @property
    def call(self) -> Any:
        """The wrapper that runs the module."""
        return self.func.__self__  # type: ignore[attr-defined]

    @property
    def forward(self) -> Any:
        """The wrapped forward: the module's own, or another wrapper's."""
        return self.args[-1]

    def around(self, forward: Any) -> "RunBy":
        """The same wrapper around another forward."""
        return RunBy(self.func, self.args[0], forward)


@attrs.define(eq=False)
class Skeleton:
    """A copy of the module without memory: calls put parameters and buffers into it.

    Attributes:
        module: the copy.
        owners: the modules in it, by path.
        owned: the places of each parameter among the modules' parameters.
        names: the name of the buffer at each place.
        places: the places of each buffer among the modules' buffers.
        slots: all places of each parameter.
        elsewhere: further places of buffers: attributes, lists, closures.
        rnns: the modules in it that have a second list of their weights.
        placeholders: the meta parameters that it was made with, until others replace them.
        tensors: the names of attributes that are tensors, or containers of them, and not buffers.
        version: the version of ``Apply.module`` whose attributes it has.
        changes: those changes.
        attributes: each module's own attributes when it was leased; a call's changes are undone at the end.
        references: what in ``tensors`` something else in the module refers to, with its path and the place of the reference.
        same: the paths in ``tensors`` at which there is one container or tensor, each with the first.
        tried: whether it ran without values.
        bound: the parameters in place.
        identity: of these.
        calls: the wrappers that run the modules inside of it.
        marked: the tensors that are marked as parameters.
        flags: which of the parameters required grad when they were put in place.
    """

    module: nn.Module
    owners: dict[str, nn.Module]
    owned: Mapping[str, list[Place]]
    names: Mapping[Place, str]
    places: Mapping[str, list[Place]]
    slots: dict[str, list[Put]]
    elsewhere: dict[str, list[Put]]
    rnns: list[nn.RNNBase]
    version: int
    changes: ModuleChanges
    tensors: list[str]
    placeholders: dict[str, Tensor]
    references: list[tuple[AttributePath, Any, Put]]
    attributes: list[dict[str, Any]] = attrs.field(factory=list)
    tried: bool = False
    identity: tuple[int, ...] = ()
    calls: tuple[Any, ...] = ()
    bound: Mapping[str, Tensor] = attrs.field(factory=dict)
    marked: list[tuple[Tensor, Collection[str]]] = attrs.field(factory=list)
    flags: list[bool] = attrs.field(factory=list)
    _plain: list[tuple[nn.Module, Any]] = attrs.field(factory=list)  # the modules that ``calls`` run, and their own forward
    _leased: list[dict[str, Any]] = attrs.field(factory=list)  # the attributes with what the state had
    _leased_parts: tuple[list[list[str]], list[Any]] = ([], [])  # the keys of each of these, and the values of all
    _touched: set[str] = attrs.field(factory=set)  # the modules in which they differ from ``attributes``
    _copies: dict[str, Noted] = attrs.field(factory=dict)
    _stores: dict[str, dict[str, Any]] = attrs.field(init=False)  # where each module has its buffers
    _shared: list[dict[str, Any]] = attrs.field(init=False)  # what it had there by itself

    _parted: list[tuple[str, str, list[Noted]]] = attrs.field(factory=list)  # were one, and are two copies
    _referring: list[tuple[AttributePath, Any, Put, Noted]] = attrs.field(factory=list)  # with the copy that is there
    same: Mapping[AttributePath, AttributePath] = attrs.field(init=False)
    _homes: list[tuple[str, str, dict[str, Any], str]] = attrs.field(init=False)  # of each parameter: name, place, dict and key

    @same.default
    def _same_as_built(self) -> Mapping[AttributePath, AttributePath]:
        return shared_paths({name: self._now(name) for name in self.tensors}, {})

    def _now(self, name: str) -> Any:
        path, key = parted(name)
        return vars(self.owners[path]).get(key, ABSENT)

    @_homes.default
    def _homes_of_parameters(self) -> list[tuple[str, str, dict[str, Any], str]]:
        places = [(name, path, key) for name, places in self.owned.items() for path, key in places]
        stores: dict[str, Any] = {path: parameters_of(self.owners[path]) for _, path, _ in places}
        # scripted modules have a dict of another kind, and keep theirs
        return [(name, joined(path, key), stores[path], key) for name, path, key in places if isinstance(stores[path], dict)]

    @_stores.default
    def _stores_of_owners(self) -> dict[str, dict[str, Any]]:
        return {path: buffers_of(owner) for path, owner in self.owners.items()}

    @_shared.default
    def _own_buffers(self) -> list[dict[str, Any]]:
        return [dict(store) for store in self._stores.values()]

    def bind(self, params: Mapping[str, Tensor]) -> None:
        """Puts the parameters in all their places.

        Raises:
            ValueError: a parameter has a further place that cannot be set.
        """
        for name, parameter in params.items():
            for put in self.slots[name]:
                put(parameter)
        for rnn in self.rnns:  # these read their weights from a second list
            refresh_flat_weights(rnn)
        if self.placeholders:
            self._check_places(params)
        self.bound = params
        self.identity = tuple(map(id, params.values()))

    def _check_places(self, params: Mapping[str, Tensor]) -> None:
        names, bare = [name for name in self.placeholders if name in params], self.placeholders
        tensors = [bare.pop(name) for name in names]
        if any(held_elsewhere(tensors)):
            gc.collect()
        for name, held in zip(names, held_elsewhere(tensors), strict=True):
            if held:
                raise ValueError(
                    f"fds.functional: something in {type(self.module).__name__} holds the parameter {name!r} where a call "
                    "cannot put the step's: the key of a dict, a set, or an object that hides it. Key tables by the "
                    "parameter's name, and refer to parameters by attributes, lists, tuples or the values of dicts"
                )

    def put(self, held: ModuleValues) -> None:
        """Sets the modules' buffers."""
        for name, buffer in held.values.items():
            for path, key in self.places.get(name) or [parted(name)]:
                store = self._stores.get(path)
                if store is not None and store.get(key, ABSENT) is not buffer:
                    store[key] = buffer
        for name, places in self.elsewhere.items():
            for put in places:
                put(held.values[name])

    def note(self, held: ModuleValues) -> list[str]:
        """Stores the buffers that a call has replaced, and returns their names."""
        assigned = []
        for (path, store), shared in zip(self._stores.items(), self._shared, strict=True):
            if shared and not shared.keys() <= store.keys():
                name = joined(path, min(shared.keys() - store.keys()))
                raise RuntimeError(f"a call deleted its buffer {name!r}, and a state has one set of buffers: set it to None")
            for key, buffer in store.items():
                name = self.names.get((path, key)) or joined(path, key)
                if held.values.get(name) is not buffer:
                    held.values[name] = store[key] = usable(buffer, {})
                    assigned.append(name)
        return assigned

    def lease(self, held: ModuleValues) -> None:
        """Records the module's own attributes, and sets those that the state has.

        Tensors among them may be written, and are copied.
        """
        self.attributes = [dict(vars(owner)) for owner in self.owners.values()]
        self._copies = {}
        memo: dict[int, Any] = {}  # modules may share a dict, and attributes a tensor
        parts: dict[AttributePath, Any] = {}
        built: dict[AttributePath, Any] = {}
        same = self.same if held.same is None else held.same
        self._touched = set()
        for name in dict.fromkeys((*self.tensors, *held.attributes, *held.others)):
            path, key = parted(name)
            owner = self.owners.get(path)
            if owner is None:
                continue
            self._touched.add(path)
            (first,) = same.get((name,), (name,))
            value = held.attributes.get(first, vars(owner).get(key))
            if first in held.others:
                if name in self.changes.since(held.others[first].version):  # the user has set it since
                    continue
                value = held.others[first].value
            value = copied(value, memo)
            built.update(parts_of((name,), vars(owner).get(key)) if self.references else ())
            put_attribute(owner.__dict__, key, value)
            parts.update(parts_of((name,), value))
            if first not in held.others:
                self._copies[name] = noted(value)
        self._leased = [
            dict(vars(owner)) if path in self._touched else before
            for (path, owner), before in zip(self.owners.items(), self.attributes, strict=True)
        ]
        self._parted = [
            (_dotted(first), _dotted(path), [noted(parts[first]), noted(parts[path])])
            for path, first in same.items()
            if len(path) + len(first) > 2 and path in parts and first in parts
            if parts[path] is not parts[first] or not isinstance(parts[path], Tensor)  # one tensor stays one in a state
        ]
        self._referring = [
            (path, part, put, noted(parts[path]))
            for path, part, put in self.references
            if path in parts and built[path] is part
        ]
        for *_, put, (copy, *_) in self._referring:
            put(copy)
        self._leased_parts = [*map(list, self._leased)], [*chain.from_iterable(map(dict.values, self._leased))]

    def _changed(self) -> list[tuple[str, nn.Module, dict[str, Any]]]:
        """The modules in which calls have set attributes, with their paths and the attributes as they were leased."""
        now, (keys, values) = [*map(vars, self.owners.values())], self._leased_parts
        if [*map(list, now)] == keys and all(map(is_, chain.from_iterable(map(dict.values, now)), values)):  # they are many
            return []
        rows = [(path, owner, leased) for (path, owner), leased in zip(self.owners.items(), self._leased, strict=True)]
        return [row for row in rows if [*map(id, chain(*vars(row[1]).items()))] != [*map(id, chain(*row[2].items()))]]

    def _has_written(self, name: str, value: Any, before: Any, held: ModuleValues) -> bool:
        """Whether calls have set an attribute, or written into its tensors."""
        given, structure, versions = self._copies.get(name, (None, None, []))
        if name in held.attributes or value is not given or is_written(value, structure, versions):
            return True
        leaves = [x for x in tree.leaves(value) if isinstance(x, Tensor)]
        return held.looks and not all(map(bit_equal, leaves, [x for x in tree.leaves(before) if isinstance(x, Tensor)]))

    def settle(self, held: ModuleValues | None) -> None:
        """Undoes the attributes that calls have set, and stores them in ``held``."""
        memo: dict[int, Any] = {}
        values: dict[str, Any] = {}
        for _, part, put, _ in self._referring:
            put(part)
        changed = self._touched.union(path for path, _, _ in self._changed())
        for path, before, leased in zip(self.owners, self.attributes, self._leased, strict=True) if changed else ():
            if path not in changed:
                continue
            now = vars(self.owners[path])
            for key in {**now, **before, **leased}:
                name, value = joined(path, key), now.get(key, ABSENT)
                if held is not None and (value is not leased.get(key, ABSENT) or name in self._copies or name in held.others):
                    self._keep(name, value, before.get(key, ABSENT), held, memo)
                    values[name] = value
                if value is not before.get(key, ABSENT):
                    put_attribute(now, key, before.get(key, ABSENT))
        if held is not None:
            held.same = shared_paths(values, {id(copy): id(first) for *_, ((first, *_), (copy, *_)) in self._parted})
            for (name, *inside), (first, *_) in held.same.items():
                for stored in (held.attributes, held.others) if not inside else ():
                    stored.update({first: stored[name]} if name in stored and first not in stored else {})
        for store, buffers in zip(self._stores.values(), self._shared, strict=True):
            if store or buffers:
                store.clear()
                store.update(buffers)

    def _keep(self, name: str, value: Any, before: Any, held: ModuleValues, memo: dict[int, Any]) -> None:
        """Stores one attribute that calls have set, or may have written into."""
        path, key = parted(name)
        if _is_ours(self.owners.get(path), key) or (
            self.elsewhere and any(value is held.values.get(buffer) for buffer in self.elsewhere)
        ):
            return  # a wrapper; a buffer, under another name
        if key != "training" and is_state(value):
            if name in self._copies and not self._has_written(name, value, before, held):
                return
            held.others.pop(name, None)
            held.attributes[name] = usable(value, memo)
            if value is before and not tree.leaves(value):  # as it was built, and no leaf that could say so
                del held.attributes[name]
            return
        held.attributes.pop(name, None)
        held.others.pop(name, None)
        if value is not before:
            rest = kept(name, value)
            held.others[name] = OtherAttribute(rest, self.version, any(isinstance(x, Stale) for x in tree.leaves(rest)))

    def check(self, class_name: str, aliases: Mapping[str, str], held: ModuleValues) -> None:
        """Raises an error for a forward pass that has replaced parameters, or changed which require grad.

        Args:
            class_name: the module's class.
            aliases: attributes that shared memory, each with the name of what; a call may write into neither.
            held: the module's buffers in this pass.
        """
        for name, place, parameters, key in self._homes:
            if name in self.bound and parameters.get(key) is not self.bound[name]:
                raise RuntimeError(
                    f"the module {class_name} set its parameter {place!r} to another tensor in forward, and a step's params "
                    "keep their places: choose between parameters by an attribute that is a number"
                )
        if self.flags and self.flags != [p.requires_grad for p in self.bound.values()]:
            refuse_flags(class_name)
        if aliases:
            self._check_aliases(class_name, aliases, held)
        self._check_shared(class_name)

    def _check_shared(self, class_name: str) -> None:
        """Raises an error for changes of what is at several places, if the next pass would not have them at all of these."""
        names = {path[0] for path, *_ in self._referring}
        now = {path: part for name in names for path, part in parts_of((name,), self._now(name))}
        for path, _, _, (copy, *_) in self._referring:
            if now.get(path) is not copy:
                raise RuntimeError(
                    f"after a call of the module {class_name} its attribute {_dotted(path)!r} is another "
                    f"{type(copy).__name__}, and something else in it refers to the one before (an object, a list or a "
                    "function): write into it in place, or refer to it by its name alone"
                )
        for one, other, copies in self._parted:
            if any(is_written(*copy) for copy in copies) and {id(copy) for copy, *_ in copies} <= self._reached():
                raise RuntimeError(
                    f"the module {class_name} wrote into its attributes, of which {one!r} and {other!r} are one "
                    f"{type(copies[0][0]).__name__}, and a state would have two: keep one of them, or make both attributes of "
                    "modules themselves"
                )

    def _reached(self) -> set[int]:
        """The ids of the containers and tensors in the modules' attributes."""
        values = chain.from_iterable(vars(owner).values() for owner in self.owners.values())
        return {id(part) for value in values for _, part in parts_of((), value)}

    def written_references(self) -> list[str]:
        """The attributes that calls have written and to which something else in the module refers."""
        return [_dotted(path) for path, _, _, copy in self._referring if is_written(*copy)]

    def _check_aliases(self, class_name: str, aliases: Mapping[str, str], held: ModuleValues) -> None:
        """Raises an error for writes into an attribute that shared memory with another one or a buffer: here they differ."""
        for name, (given, _, versions) in self._copies.items():
            path, key = parted(name)
            other = next((its for alias, its in aliases.items() if f"{alias}.".startswith(f"{name}.")), None)
            if other is None or name in held.attributes or vars(self.owners[path]).get(key, ABSENT) is not given:
                continue
            if any(version_of(leaf) != version for leaf, version in versions if isinstance(leaf, Tensor)):
                raise RuntimeError(
                    f"the module {class_name} wrote into its attribute {name!r}, which shares memory with its {other!r}: what "
                    "is written to one would not be in the other; keep one of them, and compute the other from it in forward"
                )

    def assigned(self, held: ModuleValues) -> list[tuple[str, Tensor]]:
        """The tensors without a graph that forward has set as attributes and buffers."""
        tensors = [(name, x) for name, x in held.values.items() if x is not None and held.is_assigned(name)]
        named = ((name, x) for name, value in self._set() for x in tree.leaves(value))
        return [*tensors, *((name, x) for name, x in named if isinstance(x, Tensor) and not x.requires_grad)]

    def passing(self) -> list[str]:
        """The attributes that calls have set to tensors with a graph."""
        return [name for name, value in self._set() if has_graph(value)]

    def _set(self) -> Iterator[tuple[str, Any]]:
        """The attributes that calls have set, with their values."""
        for path, owner, leased in self._changed():
            for key, value in vars(owner).items():
                if value is not leased.get(key, ABSENT) and not _is_ours(owner, key):
                    yield joined(path, key), value

    def divert(self, calls: tuple[Any, ...]) -> None:
        """Makes each of ``calls`` run the modules that it chooses, the last outermost, in this copy."""
        if calls == self.calls:
            return
        for module, forward in reversed(self._plain):
            put_attribute(module.__dict__, "forward", forward)
        self._plain, self.calls = [], calls
        for call in calls:
            for path in call.chosen(self.module):
                module = self.module.get_submodule(path)
                self._plain.append((module, module.__dict__.get("forward", ABSENT)))
                module.__dict__["forward"] = RunBy(call.run, path, module.forward)


def _is_ours(owner: nn.Module | None, key: str) -> bool:
    """Whether the library itself sets an attribute: a wrapper, or an RNN's second list of its weights."""
    return key == "forward" or (key == "_flat_weights" and isinstance(owner, nn.RNNBase))


def _dotted(path: AttributePath) -> str:
    return ".".join(map(str, path))
