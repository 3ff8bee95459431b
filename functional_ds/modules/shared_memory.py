"""Tensors of a module that share memory, which functional values cannot, and values at several places among attributes."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.byte_ranges import overlapping
from functional_ds.base.torch_private import buffers_of, version_of
from functional_ds.step.state.buffers import AttributePath, parts_of

from .attributes import Stale
from .module_places import Place, joined

_FOLLOWS = "fds.functional got the module, and would not follow training"


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are plain attributes of a module and its submodules, or in lists, tuples and dicts that are."""
    for path, owner in module.named_modules():
        for key, value in vars(owner).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(value, Tensor):
                yield joined(path, key), value
            elif isinstance(value, (list, tuple, dict)):
                yield from ((f"{joined(path, key)}.{name}", x) for name, x in tree.named(value) if isinstance(x, Tensor))


@attrs.frozen
class SharedMemory:
    """What shares memory in a module.

    Attributes:
        buffers: those that overlap another buffer, an attribute or a frozen parameter, with the name of that.
        attributes: those that overlap another attribute or a buffer, with the name of that.
        stale: replacements for attributes that would not follow training, by their ids.
    """

    buffers: Mapping[str, str]
    attributes: Mapping[str, str]
    stale: Mapping[int, "Stale"]

    @staticmethod
    def of(module: nn.Module, params: Mapping[str, nn.Parameter], names: Mapping[Place, str]) -> "SharedMemory":
        """The shared memory of a module.

        Raises:
            ValueError: two parameters, or a trained parameter and a buffer, share memory, which copies could not keep.
        """
        named: dict[int, tuple[str, Tensor]] = {id(p): (name, p) for name, p in params.items()}
        for path, owner in module.named_modules():
            for key, buffer in buffers_of(owner).items():
                if buffer is not None:
                    named.setdefault(id(buffer), (names.get((path, key)) or joined(path, key), buffer))
        buffers = {name for name, tensor in named.values()} - params.keys()
        for name, tensor in attributes_of(module):
            named.setdefault(id(tensor), (name, tensor))
        shared: dict[str, str] = {}
        aliases: dict[str, str] = {}
        computed = ((name, x) for name, x in attributes_of(module) if x.grad_fn is not None)
        stale = {
            id(x): Stale(f"the attribute {name!r} was computed, with a graph, before {_FOLLOWS}: compute it in forward")
            for name, x in computed
        }
        for one, other in overlapping([named[key] for key in named]):
            first, second = (one, other) if one.name in params else (other, one)
            trained = first.name in params and first.tensor.requires_grad
            if second.name in params and (trained or second.tensor.requires_grad):
                raise ValueError(
                    f"fds.functional: the parameters {one.name!r} and {other.name!r} share memory, which training would part; "
                    f"tie them by assigning the parameter itself (b.weight = a.weight), not its data"
                )
            if trained and second.name in buffers:
                both = f"{one.name!r} and {other.name!r}"
                raise ValueError(
                    f"fds.functional: {both} share memory, and training would change only one; give the buffer memory of its "
                    "own, or compute it in forward"
                )
            if trained:
                what = f"the attribute {second.name!r} shared memory with the parameter {first.name!r}"
                stale.setdefault(id(second.tensor), Stale(f"{what} when {_FOLLOWS}: use the parameter itself in forward"))
            elif not buffers.isdisjoint((one.name, other.name)):
                shared |= {one.name: other.name, other.name: one.name}
            if first.name not in params:
                pairs = ((one.name, other.name), (other.name, one.name))
                aliases |= {name: its for name, its in pairs if name not in buffers}
        return SharedMemory(shared, aliases, stale)


def shared_paths(values: Mapping[str, Any], copies: Mapping[int, int]) -> dict[AttributePath, AttributePath]:
    """The paths at which there is a container or tensor that another path has, too, each with the first such path.

    Args:
        values: the attributes.
        copies: the ids of further copies of one object, each with that of the first.
    """
    parts = [part for name, value in values.items() for part in parts_of((name,), value)]
    firsts: dict[int, AttributePath] = {}
    same: dict[AttributePath, AttributePath] = {}
    for path, part in sorted(parts, key=lambda part: len(part[0])):
        if path[:1] not in same and (first := firsts.setdefault(copies.get(id(part), id(part)), path)) != path:
            same[path] = first
    return same


Noted = tuple[Any, Any, list[tuple[Any, int]]]  # a value with its structure, its leaves and the versions of its tensors


def noted(value: Any) -> Noted:
    """A value with its structure, the order of keys included, and with its leaves and the versions of its tensors."""
    structure = tree.structure(value), [list(part) for _, part in parts_of((), value) if isinstance(part, dict)]
    return value, structure, [(leaf, version_of(leaf) if isinstance(leaf, Tensor) else 0) for leaf in tree.leaves(value)]


def is_written(value: Any, structure: Any, leaves: list[tuple[Any, int]]) -> bool:
    """Whether a value has changed since it was noted."""
    _, now, rows = noted(value)
    return bool(now != structure or any(x is not y or v != w for (x, v), (y, w) in zip(rows, leaves, strict=True)))
