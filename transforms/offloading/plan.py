"""Plans of offloaded states, from shapes: which tensors an update needs together, where they are, and in which pieces."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.disk.direct_io import padded
from functional_ds.sharding.leaf_map import LeafMap, LeafShard, LeafSpec
from functional_ds.step.state.state import State

from .leaf_states import beside_params, content, shared

Place = Literal["device", "cpu", "disk"]  # from near to far

_GRAIN = 64  # elements; pieces begin at multiples of it, so that kernels vectorise alike


@attrs.frozen
class StateTensor:
    """A tensor that belongs to a unit: its param, a moment, a master.

    Attributes:
        path: in the unit's content.
        shape: of the whole tensor.
        dtype: of the tensor.
        place: where it is between updates.
        per_element: how many of its elements belong to one element of the param; 0 if it cannot be divided.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place
    per_element: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.dtype.itemsize


@attrs.frozen
class OffloadedLeaf:
    """A stored leaf with all tensors of the state that its update needs.

    Attributes:
        leaf: its index among the stored leaves.
        trained: its index among the trained leaves, None if it is frozen.
        name: its path.
        shape: of the stored leaf.
        offloaded: whether it is updated on the host: the same on every rank, even one that has no element of it.
        chunk: how many of its elements an update takes at a time.
        tensors: of its content's leaves, in order; None for small ones, which stay in memory.
        spec: its content's structure.
    """

    leaf: int
    trained: int | None
    name: str
    shape: tuple[int, ...]
    offloaded: bool
    chunk: int
    tensors: tuple[StateTensor | None, ...]
    spec: optree.PyTreeSpec = attrs.field(repr=False)

    @property
    def numel(self) -> int:
        """Elements of the stored leaf."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether an update takes all of it at once."""
        return self.chunk >= self.numel

    def on_disk(self) -> list[tuple[int, StateTensor]]:
        """The tensors in files, with their indices."""
        return [(i, tensor) for i, tensor in enumerate(self.tensors) if tensor is not None and tensor.place == "disk"]

    def pieces(self) -> "Iterator[LeafPiece]":
        """The pieces of an update; one piece if the unit is empty."""
        starts = range(0, max(self.numel, 1), max(self.chunk, 1))
        return (LeafPiece(self, start, min(start + self.chunk, self.numel)) for start in starts)

    def file(self, tensor: StateTensor) -> str:
        """The name of a tensor's file."""
        plain = "".join(c if c.isalnum() else "_" for c in f"{self.name}.{tensor.path.removesuffix('.0')}")
        return f"{self.leaf:05d}_{plain[-120:]}"

    def file_bytes(self, tensor: StateTensor) -> int:
        """The bytes of one version of it: each piece begins a page."""
        if self.whole:
            return padded(tensor.nbytes)
        count, rest = divmod(self.numel, self.chunk)
        element_bytes = tensor.per_element * tensor.dtype.itemsize
        return count * padded(self.chunk * element_bytes) + padded(rest * element_bytes)


@attrs.frozen
class LeafPiece:
    """The elements ``start..stop`` of a unit, with the matching elements of its tensors."""

    unit: OffloadedLeaf
    start: int
    stop: int

    def span(self, tensor: StateTensor) -> tuple[int, int]:
        """The range of its elements in a tensor."""
        return (0, tensor.numel) if self.unit.whole else (self.start * tensor.per_element, self.stop * tensor.per_element)

    def shape(self, tensor: StateTensor) -> tuple[int, ...]:
        """The shape of its elements in an update."""
        return tensor.shape if self.unit.whole else (self.stop - self.start, *tensor.shape[len(self.unit.shape) :])

    def nbytes(self, tensor: StateTensor) -> int:
        """Their bytes."""
        low, high = self.span(tensor)
        return (high - low) * tensor.dtype.itemsize

    def of(self, tensor: StateTensor, values: Tensor) -> Tensor:
        """A view of its elements in the values of a whole tensor."""
        low, high = self.span(tensor)
        return values.detach().view(-1)[low:high].view(self.shape(tensor))

    def leaf_map(self, parts: LeafMap) -> LeafMap:
        """Which leaves its elements belong to."""
        return cut(parts, self.unit.trained, self.start, self.stop)


@attrs.frozen
class OffloadPlan:
    """All units of a state.

    Attributes:
        units: each leaf's tensors that are moved together.
        parts: which leaves the elements of the trained leaves belong to.
        slots: the names of the slots that are split.
        lengths: for each unit the lengths of its lists.
    """

    units: tuple[OffloadedLeaf, ...]
    parts: LeafMap
    slots: tuple[str, ...]
    lengths: tuple[tuple[int | None, ...], ...]

    def __repr__(self) -> str:
        return f"OffloadPlan({len(self.units)} leaves, slots: {', '.join(self.slots) or 'none'})"


def cut(parts: LeafMap, tensor: int | None, start: int, stop: int) -> LeafMap:
    """The leaf map of a range of one of the tensors, as the only tensor; leaves outside it are empty."""
    ranks = tuple(
        tuple(_cut(p, start, stop) for p in shards if _meets(p, tensor, start, stop)) for shards in parts.shards_by_rank
    )
    present = {piece.leaf for pieces in ranks for piece in pieces}
    leaves = tuple(leaf if i in present else _empty(leaf) for i, leaf in enumerate(parts.leaves))
    return attrs.evolve(parts, leaves=leaves, shards_by_rank=ranks, partial=True)


def _meets(piece: LeafShard, tensor: int | None, start: int, stop: int) -> bool:
    if not piece.numel:
        return piece.tensor == tensor and start <= piece.start <= stop
    return piece.tensor == tensor and piece.start < stop and piece.start + piece.numel > start


def _cut(piece: LeafShard, start: int, stop: int) -> LeafShard:
    low, high = max(piece.start, start), min(piece.start + piece.numel, stop)
    return LeafShard(piece.leaf, piece.offset + low - piece.start, 0, low - start, high - low)


def _empty(leaf: LeafSpec) -> LeafSpec:
    return attrs.evolve(leaf, shape=(0,) * max(len(leaf.shape), 1), numel=0)


def tensor_specs(state: State, shape: tuple[int, ...], *, param: Place, rest: Place) -> tuple[StateTensor | None, ...]:
    """The tensors of the state of a single leaf of this shape; ``param`` is the leaf's place, ``rest`` the others'."""
    common = {id(node) for node in shared(beside_params(state, state.slots))}
    named = tree.named(content(state, state.slots))
    return tuple(
        None if id(leaf) in common else _tensor_spec(path, leaf, shape, rest if i else param)
        for i, (path, leaf) in enumerate(named)
    )


def _tensor_spec(path: str, leaf: Any, shape: tuple[int, ...], place: Place) -> StateTensor | None:
    small = not isinstance(leaf, Tensor) or not (leaf.dim() and leaf.numel())
    if not isinstance(leaf, Tensor) or (small and not path.startswith("params")):
        return None
    numel, leaf_shape = math.prod(shape), tuple(leaf.shape)
    per_element = leaf.numel() // numel if numel and leaf_shape[: len(shape)] == shape else 0
    return StateTensor(path, leaf_shape, leaf.dtype, "device" if small and place == "disk" else place, per_element)


def chunk_of(tensors: Sequence[StateTensor | None], numel: int, *, room: int, staged: int) -> int:
    """How many elements of a unit fit into a buffer; all, if one of its tensors cannot be divided.

    Args:
        tensors: the unit's.
        numel: the unit's elements.
        room: bytes of the buffer.
        staged: bytes per element that the buffer needs in addition to what comes from disk.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.per_element == 0 for tensor in present):
        return max(numel, 1)
    element_bytes = staged + sum(tensor.per_element * tensor.dtype.itemsize for tensor in present if tensor.place == "disk")
    return max(_GRAIN, room // max(element_bytes, 1) // _GRAIN * _GRAIN)
