"""The params that a loss sees, unit by unit: where they come from, and where their gradients go."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base import tree
from functional_ds.base.torch_private import disable_torch_function_subclass, make_wrapper_subclass, version_of
from functional_ds.sharding.layout import Layout
from functional_ds.step.tape import Tape

from .prefetch import Route
from .reduce import Reducer

__all__ = ["Deferred", "Resident", "Source", "Units"]


class Source(Protocol):
    """Where whole units come from."""

    def begin(self, route: Route) -> None:
        """Starts a pass over the units."""

    def fetch(self, unit: int) -> Sequence[Tensor]:
        """The unit's flat tensors, one a segment."""
        ...

    def finish(self, *, keep: bool) -> None:
        """Ends a pass."""

    def spent(self, unit: int) -> None:
        """Says that nobody holds the unit."""


@attrs.frozen(eq=False)
class Resident:
    """Units that are whole all the time."""

    layout: Layout
    flats: Sequence[Tensor]

    def begin(self, route: Route) -> None:
        """Nothing to do."""

    def fetch(self, unit: int) -> Sequence[Tensor]:
        """The unit's flat tensors."""
        return [self.flats[index].detach() for index in self.layout.units[unit].segments]

    def finish(self, *, keep: bool) -> None:
        """Nothing to do."""

    def spent(self, unit: int) -> None:
        """Nothing to do."""


class _UnitNode(torch.autograd.Function):
    """From the tape's one differentiable leaf to a unit's trained leaves; its backward hands their gradients over.

    It is made when the unit is first touched, so that autograd, which runs later nodes first, completes a unit before it
    goes on to what came earlier. Its first output is a token among the roots of the backward pass: so the node runs once
    on every rank, whatever the loss used.
    """

    @staticmethod
    def forward(ctx: Any, units: "Units", unit: int, views: tuple[Tensor, ...], handle: Tensor) -> tuple[Tensor, ...]:
        ctx.units, ctx.unit, ctx.device = units, unit, units.device
        ctx.set_materialize_grads(False)
        return (torch.zeros((), device=units.device), *views)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *grads: Tensor | None) -> tuple[None, None, None, None]:
        ctx.units.completed(ctx.unit, grads)
        return None, None, None, None


class _Saved:
    """What autograd keeps of a whole unit instead of the tensor: where it lies."""

    __slots__ = ("offset", "release", "shape", "stride", "unit", "which")

    def __init__(self, unit: int, which: int, tensor: Tensor, release: Callable[[int], None]) -> None:
        self.unit, self.which, self.release = unit, which, release
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def __del__(self) -> None:
        self.release(self.unit)


class _Kept:
    """What autograd keeps of any other tensor; torch itself checks for changes only where there are no hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # An output kept as it is would hold on to its own node.
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


class Units:
    """The units of a tree within one tape.

    The loss sees deferred leaves. A touch fetches the leaf's unit from the source and, where gradients are wanted, puts a
    node into the graph that will hand the unit's gradients to the reducer. With ``frees`` (the source can fetch again) what
    autograd saves of a unit is replaced by its place, so that the unit can go after its forward and come back, without
    recomputing activations, when the backward pass first needs it. With ``keep`` what is whole when the forward pass ends
    stays for the backward, which needs it first.
    """

    def __init__(
        self, layout: Layout, source: Source, reducer: Reducer | None, device: torch.device, *, frees: bool, keep: bool
    ) -> None:
        self.layout, self.source, self.reducer, self.device = layout, source, reducer, device
        self._frees, self._keep = frees, keep
        self._leaves: dict[int, dict[int, Tensor]] = {}  # unit -> leaf index -> the real tensor
        self._owners: dict[int, tuple[int, int, StorageWeakRef]] = {}  # storage -> unit, place in the unit, while it lives
        self._held: Counter[int] = Counter()  # unit -> saved tensors that still refer to it
        self._in_backward = False
        self._handle: Tensor | None = None
        self._roots: list[Tensor] = []

    def open(self, tape: Tape, forward: Route, backward: Route) -> Any:
        """The tree of deferred leaves, whose forward pass begins here and whose backward ends with the tape's."""
        self.source.begin(forward)
        self._backward_route = backward
        tape.at_end(self._close)
        tape.at_forward_end(lambda: self._end_forward(tape.records))
        if tape.records:
            self._handle, self._roots = tape.watch(torch.zeros((), device=self.device)), tape.roots
            tape.collect_with(self._collect)
            tape.push_with(self._push)
            if self._frees:
                tape.during_forward(saved_tensors_hooks(self._pack, self._unpack))
                tape.claims.append(lambda tensor: self._owner(tensor) is not None)
        leaves = self._deferred(tape.records)
        slots = (s for unit in self.layout.units for index in unit.segments for s in self.layout.segments[index].slots)
        tape.placeholders.update({id(leaves[slot.leaf]): self.layout.paths[slot.leaf] for slot in slots})
        return tree.unflatten(self.layout.spec, leaves)

    def forget(self, unit: int) -> None:
        """The source has dropped the unit; an operation that has its leaves in hand may still save them."""
        self._leaves.pop(unit, None)

    def completed(self, unit: int, grads: Sequence[Tensor | None]) -> None:
        """A backward node of the unit has run."""
        if self.reducer is not None:
            self.reducer.add(unit, grads, self.device)
        if not self._held[unit]:
            self.source.spent(unit)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _deferred(self, records: bool) -> list[Tensor]:
        leaves: list[Any] = [None] * len(self.layout.paths)
        for segment in self.layout.segments:
            for slot in segment.slots:
                fetch = _Fetch(self, segment.unit, slot.leaf)
                wants_grad = records and segment.trainable
                leaves[slot.leaf] = Deferred(slot.shape, segment.dtype, self.device, wants_grad, fetch)
        return leaves

    def leaf(self, unit: int, index: int) -> Tensor:
        """The real tensor behind a deferred leaf."""
        found = self._leaves.get(unit)
        if found is None:
            found = self._leaves[unit] = self._enter(unit)
        return found[index]

    def _enter(self, unit: int) -> dict[int, Tensor]:
        flats = self.source.fetch(unit)
        indices = self.layout.units[unit].segments
        leaves: dict[int, Tensor] = {}
        for which, (index, flat) in enumerate(zip(indices, flats, strict=True)):
            segment = self.layout.segments[index]
            if self._frees and flat.numel():
                storage = flat.untyped_storage()
                self._owners[storage.data_ptr()] = (unit, which, StorageWeakRef(storage))
            leaves.update(zip((slot.leaf for slot in segment.slots), segment.views(flat), strict=True))
        trained = [
            slot.leaf
            for index in indices
            if self.layout.segments[index].trainable
            for slot in self.layout.segments[index].slots
        ]
        if trained and self._handle is not None:
            views = tuple(leaves[i] for i in trained)
            leaves.update(zip(trained, self._again(views) if self._in_backward else self._node(unit, views), strict=True))
        return leaves

    def _node(self, unit: int, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            token, *outputs = _UnitNode.apply(self, unit, views, self._handle)
        self._roots.append(token)
        if self.reducer is not None:
            self.reducer.waiting[unit] = self.reducer.waiting.get(unit, 0) + 1
        return tuple(outputs)

    def _again(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """For a recomputation, which checks that its leaves require grad as they did, and takes no gradients of them."""
        return tuple(view.detach().requires_grad_() for view in views)

    def _end_forward(self, records: bool) -> None:
        if records and self.reducer is not None:
            for unit in range(len(self.layout.units)):  # untouched here; other ranks may have touched them
                if self.reducer.trained(unit) and unit not in self.reducer.waiting:
                    self._node(unit, ())
        self._leaves.clear()
        self._owners.clear()
        self.source.finish(keep=records and self._keep)
        if records:
            self._in_backward = True
            self.source.begin(self._backward_route)

    def _close(self) -> None:
        """Lets go of everything: the graph's nodes refer to this object, and a cycle would keep the memory for a while."""
        self._leaves.clear()
        self._owners.clear()
        self._roots.clear()
        self._handle = self.reducer = None
        self.source = Resident(self.layout, ())

    # -- backward ------------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        owner = self._owner(tensor)
        if owner is None:
            return _Kept(tensor)
        self._held[owner[0]] += 1
        return _Saved(*owner, tensor, self._release)

    def _owner(self, tensor: Tensor) -> tuple[int, int] | None:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        owner = self._owners.get(tensor.untyped_storage().data_ptr())
        if owner is None or owner[2].expired():  # other memory may lie there now
            return None
        unit, which, _ = owner
        segment = self.layout.segments[self.layout.units[unit].segments[which]]
        return (unit, which) if segment.dtype == tensor.dtype else None

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _Kept):
            return saved.unchanged()
        flat = self.source.fetch(saved.unit)[saved.which]
        return torch.as_strided(flat, saved.shape, saved.stride, saved.offset)

    def _release(self, unit: int) -> None:
        self._held[unit] -= 1
        if self._in_backward and not self._held[unit]:
            self.source.spent(unit)

    def _push(self, grads: Mapping[str, Tensor]) -> None:
        """Gradients that were summed elsewhere, unit by unit as a backward pass would complete them."""
        for unit in reversed(range(len(self.layout.units))):
            trained = [] if self.reducer is None else self.reducer.trained(unit)
            if trained and self.reducer is not None:
                self.reducer.waiting[unit] = 1  # however many nodes have been made, which nobody walks
                slots = (slot for index in trained for slot in self.layout.segments[index].slots)
                self.completed(unit, [grads.get(self.layout.paths[slot.leaf]) for slot in slots])

    def _collect(self, grads: list[Tensor | None]) -> list[Tensor]:
        self.source.finish(keep=False)
        return [] if self.reducer is None else self.reducer.finish()


@attrs.frozen(eq=False)
class _Fetch:
    units: Units
    unit: int
    index: int

    def __call__(self) -> Tensor:
        return self.units.leaf(self.unit, self.index)


_T = torch.Tensor
# What can be answered from the shape, dtype and device alone, without fetching anything.
_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
    *("is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "itemsize", "nbytes", "grad", "names"),
)
_METADATA: frozenset[Any] = frozenset(
    [
        *(getattr(_T, name).__get__ for name in _PROPERTIES if hasattr(_T, name)),
        *(_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.stride, _T.is_contiguous, _T.element_size, _T.get_device),
        *(_T.is_floating_point, _T.is_complex, _T.is_signed, _T.__len__, _T.__hash__, _T.type),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    ]
)


class Deferred(torch.Tensor):
    """A leaf that the loss sees: shape, dtype and device are known, the values are fetched at first use.

    Every torch function that gets one gets the real tensor instead; there are no hooks on modules, so any code that
    computes with tensors will do.
    """

    _fetch: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool, fetch: Callable[[], Tensor]
    ) -> "Deferred":
        self: Deferred = make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        self._fetch = fetch
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Deferred({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with disable_torch_function_subclass():
                return func(*args, **(kwargs or {}))
        return func(*(_real(x) for x in args), **{name: _real(x) for name, x in (kwargs or {}).items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*(_real(x) for x in args), **{name: _real(x) for name, x in (kwargs or {}).items()})


def _real(value: Any) -> Any:
    """The value with every deferred tensor in it fetched."""
    if isinstance(value, Deferred):
        return value._fetch()
    if isinstance(value, (list, tuple)) and any(isinstance(v, (Deferred, list, tuple, dict)) for v in value):
        real = [_real(v) for v in value]
        return type(value)(*real) if hasattr(value, "_fields") else type(value)(real)
    if isinstance(value, dict):
        return {k: _real(v) for k, v in value.items()}
    return value
