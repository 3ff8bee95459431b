"""Which tensors of a state an update needs together, where they are, and in which pieces: data, made from shapes alone."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.tree import NAMESPACE
from functional_ds.sharding.leaf_map import Leaf, LeafMap, LeafShard
from functional_ds.step.state import State

from .files import padded
from .handles import is_handle

__all__ = [
    "Kind",
    "Place",
    "Plan",
    "Unit",
    "bare",
    "chunk_of",
    "content",
    "cut",
    "flat",
    "joined",
    "kinds_of",
    "lengths",
    "parted",
    "rest_of",
    "shared",
]

Place = Literal["here", "cpu", "disk"]

_GRAIN = 64  # elements; where pieces begin, so that no kernel's vectors lie otherwise than in the whole


@attrs.frozen
class Kind:
    """A tensor that belongs to a unit: its param, a moment, a master.

    Attributes:
        path: in the unit's content.
        shape: of the whole unit's.
        dtype: its own.
        place: where it is between updates.
        each: how many of its elements belong to one of the param's; 0 where it goes with the unit as a whole.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place
    each: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.numel * self.dtype.itemsize


@attrs.frozen
class Unit:
    """A stored leaf with everything that an update needs of the state to move it.

    Attributes:
        leaf: which of the stored leaves.
        trained: which of the trained ones, None where it is frozen.
        name: its path.
        shape: of the stored leaf.
        away: whether it is updated on the host: so on every rank, though a rank may have nothing of it.
        chunk: how many of its elements an update takes at a time.
        kinds: what its content's leaves are, in order; None for what is small and stays in memory.
        spec: its content's structure.
    """

    leaf: int
    trained: int | None
    name: str
    shape: tuple[int, ...]
    away: bool
    chunk: int
    kinds: tuple[Kind | None, ...]
    spec: optree.PyTreeSpec = attrs.field(repr=False)

    @property
    def numel(self) -> int:
        """How many elements the stored leaf has."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether an update takes all of it at once."""
        return self.chunk >= self.numel

    def on_disk(self) -> "list[tuple[int, Kind]]":
        """The kinds that are in files, with their places among all."""
        return [(i, kind) for i, kind in enumerate(self.kinds) if kind is not None and kind.place == "disk"]

    def spans(self) -> Iterator[tuple[int, int]]:
        """Its pieces: from which element to which."""
        return ((start, min(start + self.chunk, self.numel)) for start in range(0, max(self.numel, 1), max(self.chunk, 1)))

    def span(self, kind: Kind, start: int, stop: int) -> tuple[int, int]:
        """Which elements of a kind go with the unit's ``start..stop``."""
        return (0, kind.numel) if self.whole else (start * kind.each, stop * kind.each)

    def sub_shape(self, kind: Kind, start: int, stop: int) -> tuple[int, ...]:
        """The shape in which an update gets them."""
        return kind.shape if self.whole else (stop - start, *kind.shape[len(self.shape) :])

    def file(self, kind: Kind) -> str:
        """The name of a kind's file."""
        plain = "".join(c if c.isalnum() else "_" for c in f"{self.name}.{kind.path.removesuffix('.0')}")
        return f"{self.leaf:05d}_{plain[-120:]}"

    def file_bytes(self, kind: Kind) -> int:
        """How many bytes a version of it takes."""
        if self.whole:
            return padded(kind.nbytes)
        whole, left = divmod(self.numel, self.chunk)
        return whole * padded(self.chunk * kind.each * kind.dtype.itemsize) + padded(left * kind.each * kind.dtype.itemsize)


@attrs.frozen
class Plan:
    """All units.

    Attributes:
        parts: what lies where in the trained leaves.
        slots: the names of the slots that are taken apart.
        lengths: for each unit, how long its lists are.
    """

    units: tuple[Unit, ...]
    parts: LeafMap
    slots: tuple[str, ...]
    lengths: tuple[tuple[int | None, ...], ...]


def content(state: State, slots: Collection[str]) -> dict[str, Any]:
    """What a state of one leaf, stored in a list, holds of it; the leaf comes first when it is flattened."""
    return {"params": state.params, "rest": rest_of(state, slots)}


def rest_of(state: State, slots: Collection[str]) -> dict[str, Any]:
    """What lies beside the params."""
    return {"optimizer": state.optimizer, "slots": {name: state.slots[name] for name in sorted(slots)}}


def flat(tree_: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves, handles among them, and the structure."""
    return optree.tree_flatten(tree_, is_leaf=is_handle, namespace=NAMESPACE)


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def _skeleton(rest: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The outermost lists, and whatever is in none, as leaves."""
    found, spec = optree.tree_flatten(rest, is_leaf=lambda node: _is_list(node) or is_handle(node), namespace=NAMESPACE)
    return found, spec


def lengths(rest: Any) -> tuple[int | None, ...]:
    """How long the outermost lists are, None for what is in none."""
    return tuple(len(node) if _is_list(node) else None for node in _skeleton(rest)[0])


def shared(rest: Any) -> list[Any]:
    """What is in no list."""
    return [node for node in _skeleton(rest)[0] if not _is_list(node)]


def bare(rest: Any) -> Any:
    """With empty lists: what belongs to no leaf."""
    (found,) = parted(rest, [[None if count is None else 0 for count in lengths(rest)]])
    return found


def joined(rests: Sequence[Any], like: Any) -> Any:
    """One state from those of single leaves: their lists one after the other, and what is in none as ``like`` has it.

    Raises:
        ValueError: their structures differ.
    """
    flats = [_skeleton(rest) for rest in rests]
    model, spec = _skeleton(like)
    odd = next((other for _, other in flats if other != spec), None)
    if odd is not None:
        raise ValueError(f"the states of two leaves differ in structure: {spec} and {odd}")
    nodes = [[x for found, _ in flats for x in found[place]] if _is_list(node) else node for place, node in enumerate(model)]
    return tree.unflatten(spec, nodes)


def parted(rest: Any, rows: Sequence[Sequence[int | None]]) -> list[Any]:
    """The inverse of ``joined``."""
    found, spec = _skeleton(rest)
    at = [0] * len(found)
    result = []
    for row in rows:
        nodes = [node if count is None else node[i : i + count] for node, count, i in zip(found, row, at, strict=True)]
        at = [i + (count or 0) for i, count in zip(at, row, strict=True)]
        result.append(tree.unflatten(spec, nodes))
    return result


def cut(parts: LeafMap, tensor: int | None, start: int, stop: int) -> LeafMap:
    """What lies where in a stretch of one of the tensors, as the only one; leaves that are not in it are empty."""
    ranks = tuple(tuple(_cut(p, start, stop) for p in pieces if _meets(p, tensor, start, stop)) for pieces in parts.ranks)
    present = {piece.leaf for pieces in ranks for piece in pieces}
    leaves = tuple(leaf if i in present else _empty(leaf) for i, leaf in enumerate(parts.leaves))
    return attrs.evolve(parts, leaves=leaves, ranks=ranks)


def _meets(piece: LeafShard, tensor: int | None, start: int, stop: int) -> bool:
    if not piece.numel:
        return piece.tensor == tensor and start <= piece.start <= stop
    return piece.tensor == tensor and piece.start < stop and piece.start + piece.numel > start


def _cut(piece: LeafShard, start: int, stop: int) -> LeafShard:
    low, high = max(piece.start, start), min(piece.start + piece.numel, stop)
    return LeafShard(piece.leaf, piece.offset + low - piece.start, 0, low - start, high - low)


def _empty(leaf: Leaf) -> Leaf:
    return attrs.evolve(leaf, shape=(0,) * max(len(leaf.shape), 1), numel=0)


def kinds_of(state: State, shape: tuple[int, ...], *, param: Place, rest: Place) -> tuple[Kind | None, ...]:
    """What the leaves of a single leaf's content are."""
    common = {id(node) for node in shared(rest_of(state, state.slots))}
    found = tree.named(content(state, state.slots))
    return tuple(
        None if id(leaf) in common else _kind(path, leaf, shape, rest if place else param)
        for place, (path, leaf) in enumerate(found)
    )


def _kind(path: str, leaf: Any, shape: tuple[int, ...], place: Place) -> Kind | None:
    if not isinstance(leaf, Tensor) or (not (leaf.dim() and leaf.numel()) and not path.startswith("params")):
        return None
    numel, own = math.prod(shape), tuple(leaf.shape)
    mirrors = own[: len(shape)] == shape and numel > 0
    small = not (leaf.dim() and leaf.numel())  # nothing to read or write
    where: Place = "here" if small and place == "disk" else place
    return Kind(path, own, leaf.dtype, where, leaf.numel() // numel if mirrors else 0)


def chunk_of(kinds: Sequence[Kind | None], numel: int, *, room: int, staged: int) -> int:
    """How many elements of a unit fit into a buffer; all, where something of it goes with the unit as a whole.

    Args:
        kinds: the unit's.
        numel: its elements.
        room: the buffer's bytes.
        staged: bytes an element that the buffer must hold beside what comes from the disk.
    """
    found = [kind for kind in kinds if kind is not None]
    if any(kind.each == 0 for kind in found):
        return max(numel, 1)
    each = staged + sum(kind.each * kind.dtype.itemsize for kind in found if kind.place == "disk")
    return max(_GRAIN, room // max(each, 1) // _GRAIN * _GRAIN)
