"""Module buffers as a part of the state: a forward pass reads them and returns what it wrote.

A pass (one micro-batch's forward and backward) opens a ``BufferScope`` on the state's buffers. Modules read from it and write
to it; ``collect`` gives the buffers of the next state. The tensors of the state are never written.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import module_of
from functional_ds.comm.worlds.current import recorder

from .slots import Role

BUFFERS = "buffers"  # the name of the slot
POLICIES = ("first", "mean", "own")
AttributePath = tuple[Any, ...]  # of a value in a module's attributes: the attribute's name, and the keys inside of it
_NUMBERS = {torch.bool: bool, torch.int64: int, torch.float64: float, torch.complex128: complex}


class HasBuffers(Protocol):
    """A module as a function: ``Apply``."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers in its ``state_dict``, as the module was built, by name."""

    @property
    def modes(self) -> tuple[int, ...]:
        """What its calls depend on besides tensors: which of its modules are in training mode, and the number of edits."""

    @property
    def version(self) -> int:
        """The number of changes that a user has made to the module."""

    def notice(self) -> tuple[int, ...]:
        """Checks for such changes; returns the modes."""

    def changed(self, version: int) -> Collection[str]:
        """The names of the attributes and buffers that were changed since that version."""

    def container(self, name: str) -> tuple[str, Any] | None:
        """The name and value of the list, tuple or dict that contains the attribute of this name; None if there is none."""


@attrs.frozen(eq=False)
class Modules:
    """The modules of a step, by the path of their parameters in the params' tree: ``""`` for the whole tree."""

    by_key: Mapping[str, HasBuffers]

    @staticmethod
    def of(params: Any, given: Any = None) -> "Modules":
        """The given modules, and those whose parameters came from ``fds.functional``.

        Raises:
            TypeError: a given value is not an ``apply``.
        """
        named = {"": given} if given is not None and not isinstance(given, Mapping) else dict(given or {})
        for name, module in named.items():
            if not (hasattr(module, "buffers") and hasattr(module, "modes")):
                what = f"modules[{name!r}]" if isinstance(given, Mapping) else "modules"
                raise TypeError(f"{what}={type(module).__name__} is not an apply; pass what fds.functional(module) gave first")
        known = {id(module) for module in named.values()}
        for path, leaf in tree.named(params):
            ref = module_of(leaf)
            if ref is not None and id(ref[0]) not in known:
                known.add(id(ref[0]))
                key = path.removesuffix(ref[1]).rstrip(".")
                if named.setdefault(key, ref[0]) is not ref[0] and ref[0].buffers:
                    raise ValueError(
                        f"init: the params at {key!r} are two modules', and both may have buffers: pass "
                        "modules={name: apply, ...} with the applies that fds.functional gave"
                    )
        return Modules(named)


@attrs.frozen(eq=False)
class OtherAttribute:
    """An attribute of a module.

    Attributes:
        value: what the next pass reads.
        version: the version of ``Apply.module`` that the pass knew that set it; a later user's change overrides it.
        passing: whether the value belonged to one pass, so that later ones cannot use it.
    """

    value: Any
    version: int
    passing: bool


@attrs.define(eq=False)
class OtherAttributes(tree.Uncompared):
    """Attributes of all modules that are kept from step to step, but not in checkpoints.

    Attributes:
        by_key: for each module by the names of the attributes.
        versions: for each module the version of ``Apply.module`` that the state's last pass, or ``init``, knew.
        same: for each module the paths at which there was one object after its last pass, each with the first.
    """

    by_key: Mapping[str, Mapping[str, OtherAttribute]] = attrs.field(factory=dict)
    versions: Mapping[str, int] = attrs.field(factory=dict)
    same: Mapping[str, Mapping[AttributePath, AttributePath] | None] = attrs.field(factory=dict)


@attrs.define(eq=False)
class ModuleFacts(tree.Uncompared):
    """What a program has learned about its modules; it changes no value, and is not saved.

    Attributes:
        keys: each module's key in ``Buffers``.
        written: for each key, which of the module's buffers its passes write, once a pass was inspected.
        sets: for each key, which attributes its passes set to tensors and numbers.
        modes: the modes in which that was so.
        agreed: for each group of ranks, which rank provides which buffer: an ``Agreement``.
        pickled: whether the state was unpickled, without its modules.
    """

    keys: dict[Any, str] = attrs.field(factory=dict)
    written: dict[str, frozenset[str]] = attrs.field(factory=dict)
    sets: dict[str, frozenset[str]] = attrs.field(factory=dict)
    modes: dict[str, tuple[int, ...]] = attrs.field(factory=dict)
    agreed: dict[tuple[tuple[int, ...], str], Any] = attrs.field(factory=dict)
    pickled: bool = False

    @property
    def mine(self) -> frozenset[tuple[str, str]]:
        """The buffers that this rank's passes write, with their modules' keys."""
        return frozenset((key, name) for key, names in self.written.items() for name in names)

    def __deepcopy__(self, memo: Any) -> "ModuleFacts":
        return self

    def __reduce__(self) -> Any:
        return ModuleFacts, ({}, {}, {}, {}, {}, True)  # modules are not pickled with a state


@tree.record
class Buffers:
    """The slot of the modules' buffers.

    Attributes:
        values: the buffers by name, for each module by its key; None for one that its module has set to None.
        attributes: other tensors and numbers that forward passes have set on modules, likewise.
        known: what the program has learned about its modules.
        policy: whose buffers data-parallel ranks keep.
        others: what else they have set.
    """

    values: dict[str, dict[str, Any]]
    attributes: dict[str, dict[str, Any]]
    known: ModuleFacts = tree.static()
    policy: str = tree.static(default="first")
    others: OtherAttributes = tree.static(default=OtherAttributes())

    roles: ClassVar[Mapping[str, Role]] = {"values": Role.BUFFER, "attributes": Role.ATTRIBUTE}

    @property
    def per_rank(self) -> frozenset[str]:
        """The fields that differ between ranks."""
        return frozenset(self.roles) if self.policy == "own" else frozenset()

    @staticmethod
    def fresh(modules: Modules, policy: str, device: torch.device) -> "Buffers | None":
        """The modules' initial buffers; None if there is no module."""
        if not modules.by_key:
            return None
        for module in modules.by_key.values():
            module.notice()
        values = {
            key: {name: plain_copy(buffer) for name, buffer in module.buffers.items()} for key, module in modules.by_key.items()
        }
        known = ModuleFacts({module: key for key, module in modules.by_key.items()})
        others = OtherAttributes({}, {key: module.version for key, module in modules.by_key.items()})
        return Buffers(values, {key: {} for key in values}, known, policy, others)

    def of(self, module: HasBuffers) -> Mapping[str, Any]:
        """One module's, by name; empty if the state does not have the module."""
        key = self.known.keys.get(module)
        return {} if key is None else self.values[key]

    def links(self) -> str:
        """What a pass reads beside values and structure: the order of keys in attributes, and which of these are one object."""
        named = [((key, name), held[name]) for key, held in sorted(self.attributes.items()) for name in sorted(held)]
        parts = [part for path, value in named for part in parts_of(path, value)]
        orders = [(path, list(part)) for path, part in parts if isinstance(part, dict)]
        same = [(key, pair) for key, pairs in self.others.same.items() for pair in (pairs or {}).items()]
        return repr((orders, [(key, pair) for key, pair in same if pair[0][0] in self.attributes[key]]))

    def named(self) -> Any:
        """By name; for several modules by their keys first."""
        by_module = {key: {**values, **self.attributes.get(key, {})} for key, values in self.values.items()}
        return by_module[""] if [*by_module] == [""] else by_module

    def with_values(self, values: Mapping[str, Any], key: str = "") -> "Buffers":
        """A copy with other values of buffers, and of tensors and numbers that forward passes have set.

        >>> import functional_ds as fds
        >>> apply, params = fds.functional(torch.nn.BatchNorm1d(2))
        >>> step = fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1))
        >>> state = step.init(params)
        >>> state = state.put(buffers=state.slots["buffers"].with_values({"running_mean": torch.ones(2)}))
        >>> step.module_buffers(state)["running_mean"]
        tensor([1., 1.])

        Args:
            values: by name.
            key: the module's, if there are several.

        Raises:
            ValueError: there is no such buffer, or it has another shape or dtype.
        """
        fields = {"values": dict(self.values), "attributes": dict(self.attributes)}
        for name, value in values.items():
            field = next((field for field, held in fields.items() if name in held.get(key, {})), None)
            if field is None:
                raise ValueError(
                    f"values={name!r}: the state has no such buffer of the module {key!r}: {sorted(self.values[key])}"
                )
            before = fields[field][key][name]
            if isinstance(before, Tensor) and (before.shape, before.dtype) != (value.shape, value.dtype):
                one, other = (f"{tuple(x.shape)} of {x.dtype}" for x in (value, before))
                raise ValueError(f"values[{name!r}] is {one}, and the state's is {other}")
            (first,) = (self.others.same.get(key) or {}).get((name,), (name,))
            new = dict.fromkeys((name, first), plain_copy(value) if isinstance(value, Tensor) else value)
            fields[field][key] = fields[field][key] | new
        for module, its in self.known.keys.items():
            if its == key:
                module.notice()
                versions = {**self.others.versions, key: module.version}
        return tree.replace(self, **fields, others=attrs.evolve(self.others, versions=versions))

    def check_changes(self, module: HasBuffers) -> None:
        """Raises an error for a module on which a user has changed what this state stores.

        Raises:
            RuntimeError: there is such a buffer, or an attribute that forward passes have set.
        """
        key = self.known.keys[module]
        version = self.others.versions.get(key, module.version)
        names = module.changed(version) if version != module.version else ()
        for name in sorted({*self.values[key], *self.attributes[key]}.intersection(names)):
            what = f"the buffer {name!r}" if name in self.values[key] else f"the attribute {name!r}, which forward sets,"
            where = f", key={key!r}" if key else ""
            raise RuntimeError(
                f"{what} was changed on apply.module after step.init, and a step reads and writes the state's: change "
                f"that one, state = state.put(buffers=state.slots['buffers'].with_values({{{name!r}: value}}{where})), or "
                "change it on apply.module before step.init(params)"
            )

    def unsaved(self) -> list[str]:
        """The attributes that forward passes have set and that checkpoints do not contain."""
        gone = {(key, name) for key, held in self.attributes.items() for name, value in held.items() if value is None}
        gone |= {(key, name) for key, held in self.others.by_key.items() for name, other in held.items() if not other.passing}
        return sorted(".".join(filter(None, path)) for path in gone)

    def grown(self, names: Iterable[tuple[str, str, tuple[int, ...], torch.dtype]]) -> "Buffers":
        """Adds empty buffers that a checkpoint has and a fresh state lacks, because modules create some only when they run.

        Args:
            names: field, path, shape and dtype of each.
        """
        fields: dict[str, dict[str, dict[str, Any]]] = {
            "values": {key: dict(held) for key, held in self.values.items()},
            "attributes": {key: dict(held) for key, held in self.attributes.items()},
        }
        for field, path, shape, dtype in sorted(names, key=lambda entry: (len(entry[1]), entry[1])):  # lists grow in order
            key = max((key for key in fields[field] if not key or path.startswith(f"{key}.")), key=len, default=None)
            if key is not None:
                plain = _NUMBERS.get(dtype) if field == "attributes" and not shape else None
                room = torch.empty(shape, dtype=dtype) if plain is None else plain()
                name = path[len(key) :].lstrip(".")
                module = next((module for module, its in self.known.keys.items() if its == key), None)
                whole = module.container(name) if field == "attributes" and module is not None else None
                if whole is not None:
                    held = fields[field][key].get(whole[0], whole[1])
                    fields[field][key][whole[0]] = _deepened(held, name[len(whole[0]) + 1 :], room)
                    continue
                now = fields[field][key].get(name)
                if not isinstance(now, Tensor) or tuple(now.shape) != shape:  # some grow as they go
                    fields[field][key][name] = room
        return tree.replace(self, **fields)


def _deepened(held: Any, inside: str, room: Any) -> Any:
    """A list, tuple or dict with a new entry at a path inside of it; unchanged if that is deeper than one entry."""
    now, copied = dict(tree.named(held)).get(inside), tree.map(lambda x: x, held)
    one, other = (tuple(x.shape) if isinstance(x, Tensor) else type(x) for x in (now, room))
    if one == other:
        return copied
    if isinstance(copied, dict):
        copied[inside] = room
    elif isinstance(copied, (list, deque)) and inside.isdecimal() and int(inside) <= len(copied):
        if int(inside) == len(copied):
            copied.append(room)
        copied[int(inside)] = room
    return copied


def plain_copy(buffer: Any) -> Any:
    """A copy that a pass may write to, even if the buffer was made in inference mode."""
    if buffer is None:
        return None
    with torch.inference_mode(False), recorder().unseen():  # no other recorder records it as a part of the function
        return buffer.detach().clone()


def parts_of(path: AttributePath, value: Any) -> Iterator[tuple[AttributePath, Any]]:
    """The tensors, lists, dicts and deques in a value, with their paths."""
    if isinstance(value, (Tensor, list, dict, deque)):
        yield path, value
    if isinstance(value, (list, tuple, dict, deque)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from parts_of((*path, key), item)
