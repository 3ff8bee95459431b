"""The params that a loss function sees: fetched unit by unit at first use, and their gradients handed to a reducer."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base import tree
from functional_ds.base.torch_private import version_of
from functional_ds.sharding.layout import Layout
from functional_ds.step.tape import Tape

from .lazy_tensor import LazyTensor
from .prefetch import FetchTrace
from .reduce import Reducer

__all__ = ["LazyParams", "UnitSource", "WholeParams"]


class UnitSource(Protocol):
    """Where whole units come from.

    Attributes:
        frees: whether it may free a unit and fetch it again.
    """

    @property
    def frees(self) -> bool: ...

    def begin(self, trace: FetchTrace) -> None:
        """Starts a pass over the units."""

    def fetch(self, unit: int) -> Sequence[Tensor]:
        """The unit's flat tensors, ``[segment.size]``, one a segment."""
        ...

    def finish(self, *, reshard: bool) -> None:
        """Ends a pass; ``reshard`` frees all units."""

    def release(self, unit: int) -> None:
        """Says that nothing refers to the unit any more."""


@attrs.frozen(eq=False)
class WholeParams:
    """The source of units that are whole all the time."""

    layout: Layout
    flats: Sequence[Tensor]
    frees = False

    def begin(self, trace: FetchTrace) -> None:
        """Does nothing."""

    def fetch(self, unit: int) -> Sequence[Tensor]:
        """The unit's flat tensors."""
        return [self.flats[index].detach() for index in self.layout.units[unit].segments]

    def finish(self, *, reshard: bool) -> None:
        """Does nothing."""

    def release(self, unit: int) -> None:
        """Does nothing."""


class _UnitNode(torch.autograd.Function):
    """A node from the tape's one differentiable leaf to a unit's trained leaves; its backward passes on their gradients.

    It is made when the unit is first touched. Autograd runs later nodes first, so it completes a unit before it goes on to
    earlier ones. The first output is a token among the roots of the backward pass: so the node runs exactly once on every
    rank, whatever the loss used.
    """

    @staticmethod
    def forward(ctx: Any, params: "LazyParams", unit: int, views: tuple[Tensor, ...], handle: Tensor) -> tuple[Tensor, ...]:
        ctx.params, ctx.unit = params, unit
        ctx.set_materialize_grads(False)
        return (torch.zeros((), device=params.device), *views)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *grads: Tensor | None) -> tuple[None, None, None, None]:
        ctx.params.completed(ctx.unit, grads)
        return None, None, None, None


class _SavedPlace:
    """What autograd saves in place of a tensor that lies in a unit: which unit, and where."""

    __slots__ = ("offset", "release", "segment", "shape", "stride", "unit")

    def __init__(self, unit: int, segment: int, tensor: Tensor, release: Callable[[int], None]) -> None:
        self.unit, self.segment, self.release = unit, segment, release
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def __del__(self) -> None:
        self.release(self.unit)


class _SavedTensor:
    """What autograd saves of any other tensor. With hooks in force torch does not check for later changes, so this does."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # An output saved with its grad_fn would keep its own node alive.
        self.tensor = tensor.detach() if tensor.grad_fn is not None else tensor
        self.version = version_of(tensor)

    def unchanged(self) -> Tensor:
        """The tensor, as it was."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that the backward pass needs has been modified by an inplace "
                f"operation: it is at version {version_of(self.tensor)}, expected {self.version}; use the out-of-place one"
            )
        return self.tensor


class LazyParams:
    """The params of one tape, as lazy tensors.

    A first touch fetches the leaf's unit from the source. Where gradients are wanted it also puts a node into the graph, which
    will hand the unit's gradients to the reducer. If the source frees units, what autograd saves of a unit is replaced by its
    place, so that the unit can be freed after its forward and fetched again when the backward pass first needs it, without
    recomputing activations.

    Args:
        layout: the units.
        source: makes the source of units, given the function that forgets a unit which the source has freed.
        reducer: takes the gradients; None where no leaf is differentiated.
        device: where the params lie.
        reshard_last_units: whether the units that are whole when the forward pass ends are freed before the backward pass.
    """

    def __init__(
        self,
        layout: Layout,
        source: Callable[[Callable[[int], None]], UnitSource],
        reducer: Reducer | None,
        device: torch.device,
        *,
        reshard_last_units: bool,
    ) -> None:
        self.layout, self.reducer, self.device = layout, reducer, device
        self._leaves: dict[int, dict[int, Tensor]] = {}  # unit -> leaf -> the fetched tensor
        self._homes: dict[int, tuple[int, int, StorageWeakRef]] = {}  # data pointer -> unit, segment in it, storage
        self._saved: Counter[int] = Counter()  # unit -> saved tensors that still refer to it
        self._reshard = reshard_last_units
        self._in_backward = False
        self._handle: Tensor | None = None
        self._roots: list[Tensor] = []
        self.source = source(self.forget)

    def open(self, tape: Tape, forward: FetchTrace, backward: FetchTrace) -> Any:
        """The tree of lazy leaves. Their forward pass begins here, and their backward pass ends with the tape's."""
        self.source.begin(forward)
        tape.at_end(self._close)
        tape.at_forward_end(lambda: self._end_forward(tape.records, backward))
        if tape.records:
            self._handle, self._roots = tape.watch(torch.zeros((), device=self.device)), tape.roots
            tape.collect_with(self._collect, self._unused)
            tape.push_with(self._push)
            if self.source.frees:
                tape.during_forward(saved_tensors_hooks(self._pack, self._unpack))
                tape.claims.append(lambda tensor: self._home(tensor) is not None)
        leaves = self._lazy_leaves(tape.records)
        slots = (s for unit in self.layout.units for index in unit.segments for s in self.layout.segments[index].slots)
        tape.placeholders.update({id(leaves[slot.leaf]): self.layout.paths[slot.leaf] for slot in slots})
        return tree.unflatten(self.layout.spec, leaves)

    def forget(self, unit: int) -> None:
        """Drops the leaves of a unit that the source has freed. An operation that holds them may still save them."""
        self._leaves.pop(unit, None)

    def completed(self, unit: int, grads: Sequence[Tensor | None], *, last: bool = False) -> None:
        """Takes the gradients of a backward node of the unit, perhaps the last whatever nodes were made."""
        if self.reducer is not None:
            self.reducer.add(unit, grads, self.device, last=last)
        if not self._saved[unit]:
            self.source.release(unit)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _lazy_leaves(self, records: bool) -> list[Tensor]:
        leaves: list[Any] = [None] * len(self.layout.paths)
        for segment in self.layout.segments:
            for slot in segment.slots:
                fetch = partial(self._leaf, segment.unit, slot.leaf)
                wants_grad = records and segment.trainable
                leaves[slot.leaf] = LazyTensor(slot.shape, segment.dtype, self.device, wants_grad, fetch)
        return leaves

    def _leaf(self, unit: int, leaf: int) -> Tensor:
        leaves = self._leaves.get(unit)
        if leaves is None:
            leaves = self._leaves[unit] = self._enter(unit)
        return leaves[leaf]

    def _enter(self, unit: int) -> dict[int, Tensor]:
        """Fetches a unit; its leaves, the trained ones behind a node."""
        flats = self.source.fetch(unit)
        leaves: dict[int, Tensor] = {}
        trained: list[int] = []
        for place, (index, flat) in enumerate(zip(self.layout.units[unit].segments, flats, strict=True)):
            segment = self.layout.segments[index]
            if self.source.frees and flat.numel():
                storage = flat.untyped_storage()
                self._homes[storage.data_ptr()] = (unit, place, StorageWeakRef(storage))
            leaves.update(zip((slot.leaf for slot in segment.slots), segment.views(flat), strict=True))
            trained += [slot.leaf for slot in segment.slots] if segment.trainable else []
        if trained and self._handle is not None:
            views = tuple(leaves[i] for i in trained)
            leaves.update(zip(trained, self._recomputed(views) if self._in_backward else self._node(unit, views), strict=True))
        return leaves

    def _node(self, unit: int, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            token, *outputs = _UnitNode.apply(self, unit, views, self._handle)
        self._roots.append(token)
        if self.reducer is not None:
            self.reducer.expect(unit)
        return tuple(outputs)

    def _recomputed(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Leaves for a recomputation, which checks that they require grad as before, and whose gradients are not used."""
        return tuple(view.detach().requires_grad_() for view in views)

    def _end_forward(self, records: bool, backward: FetchTrace) -> None:
        if records and self.reducer is not None:
            for unit in self.reducer.untouched():  # other ranks may have touched them
                self._node(unit, ())
        self._leaves.clear()
        self._homes.clear()
        self.source.finish(reshard=self._reshard or not records)
        if records:
            self._in_backward = True
            self.source.begin(backward)

    def _close(self) -> None:
        """Lets go of everything. The graph's nodes refer to this object, and a cycle would keep the memory for a while."""
        self._leaves.clear()
        self._homes.clear()
        self._roots.clear()
        if self.reducer is not None:
            self.reducer.close()
        self._handle = self.reducer = None
        self.source = WholeParams(self.layout, ())

    # -- backward ------------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _SavedPlace | _SavedTensor:
        home = self._home(tensor)
        if home is None:
            return _SavedTensor(tensor)
        self._saved[home[0]] += 1
        return _SavedPlace(*home, tensor, self._released)

    def _home(self, tensor: Tensor) -> tuple[int, int] | None:
        """The unit, and the segment in it, in whose memory the tensor lies."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        home = self._homes.get(tensor.untyped_storage().data_ptr())
        if home is None or home[2].expired():  # other memory may lie there now
            return None
        unit, place, _ = home
        segment = self.layout.segments[self.layout.units[unit].segments[place]]
        return (unit, place) if segment.dtype == tensor.dtype else None

    def _unpack(self, saved: _SavedPlace | _SavedTensor) -> Tensor:
        if isinstance(saved, _SavedTensor):
            return saved.unchanged()
        flat = self.source.fetch(saved.unit)[saved.segment]
        return torch.as_strided(flat, saved.shape, saved.stride, saved.offset)

    def _released(self, unit: int) -> None:
        self._saved[unit] -= 1
        if self._in_backward and not self._saved[unit]:
            self.source.release(unit)

    def _push(self, grads: Mapping[str, Tensor]) -> None:
        """Takes gradients by path that were summed elsewhere, unit by unit as a backward pass would complete them."""
        if self.reducer is None:
            return
        for unit in reversed(range(len(self.layout.units))):
            slots = [slot for index in self.reducer.trained(unit) for slot in self.layout.segments[index].slots]
            if slots:
                self.completed(unit, [grads.get(self.layout.paths[slot.leaf]) for slot in slots], last=True)

    def _collect(self, grads: list[Tensor | None]) -> list[Tensor]:
        self.source.finish(reshard=True)
        return [] if self.reducer is None else self.reducer.finish()

    def _unused(self) -> list[int]:
        return [] if self.reducer is None else self.reducer.unused()
