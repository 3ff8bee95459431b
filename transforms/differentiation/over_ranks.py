"""Differentiable data parallelism: what ranks sum, steps of which each rank keeps its part of the state, and their reruns."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.device import in_use, redrawn, rng_state
from functional_ds.base.marks import like_marked, without_values
from functional_ds.base.torch_private import in_dual_level, in_torch_func, version_of
from functional_ds.base.weighted import Weighted
from functional_ds.comm.graft import Graft
from functional_ds.comm.worlds.rng_state import RngState, kept_rng
from functional_ds.remat.partitioned import partition
from functional_ds.remat.saved_tensors import compact
from functional_ds.step.guards import check_same_leaves
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole, axes_of
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Layer, Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

T = TypeVar("T")
R = TypeVar("R")


def over_ranks(step: Step) -> Step:
    """The step, with only the axes of transforms that are data parallel; the same step without any."""
    if step.has(Trait.DATA_PARALLEL) is None:
        return step
    layers = [_axes_alone(layer) if Trait.DATA_PARALLEL in layer.traits else layer for layer in step.layers]
    fields = {field.name: getattr(step, field.name) for field in attrs.fields(Step) if field.init}
    sums = {**step.over_ranks, "sum_over_ranks": _summed}
    return StepOverRanks(**{**fields, "layers": tuple(layers), "over_ranks": sums})


def _axes_alone(layer: Layer) -> Layer:
    axes = [Axis(axis.group, AxisRole.BATCH, summed_in="reduce") for axis in layer.axes]
    return attrs.evolve(layer, phases={}, guards={}, slot=None, axes=axes)


@attrs.frozen(eq=False, repr=False)
class StepOverRanks(Step):
    """A differentiable step over data-parallel ranks, which is computed again in the backward pass.

    All values outside of the loss are equal on all ranks, and so are the gradients by them.
    """

    def __call__(self, state: State, batch: Any, *, donate: bool = True) -> tuple[State, Metrics]:
        """As ``Step.__call__``."""
        run = super().__call__
        return replayed(lambda given: run(*given), (state, batch), self._kept)

    def _guard(self, call: str, *args: Any) -> None:
        if self.guarded and (in_torch_func() or in_dual_level()):
            raise RuntimeError(
                f"differentiable: torch.func or forward mode runs over ranks ({self}), and collectives have a transpose only: "
                "use torch.autograd.grad, or a step without data parallelism"
            )
        super()._guard(call, *args)

    def _kept(self, given: tuple[State, Any]) -> Callable[[], tuple[State, Any]]:
        """Stores the batch, and of the state the part that a rank stores in its stage of ZeRO."""
        state, _ = given
        (axis,) = [layer.axes[-1] for layer in self.layers if Trait.DATA_PARALLEL in layer.traits]
        group = axis.ranks()
        divided = tree.leaves(state.params) if self.has(Trait.SHARDS_PARAMS) else []
        divided += tree.leaves((state.optimizer, state.slots)) if self.has(Trait.SHARDS_STATE) else []
        chosen = {id(x) for x in divided if isinstance(x, Tensor) and x.is_floating_point() and x.numel() >= group.size}
        leaves, spec = tree.flatten(given)
        kept = [_KeptShard.of(x, group) if id(x) in chosen else _KeptLeaf.of(x) for x in leaves]

        def restored() -> tuple[State, Any]:
            pieces = [x.piece for x in kept if isinstance(x, _KeptShard)]
            with torch.no_grad():
                flats = iter(comm.all_gather(pieces, group) if pieces else ())
            found = [x.whole(next(flats)) if isinstance(x, _KeptShard) else x.again() for x in kept]
            return tree.unflatten(spec, found)  # type: ignore[no-any-return]

        return restored


@attrs.frozen(eq=False)
class _KeptLeaf:
    """A leaf without its graph, and how often it had been written to."""

    leaf: Any
    version: int

    @staticmethod
    def of(leaf: Any) -> "_KeptLeaf":
        if not isinstance(leaf, Tensor):
            return _KeptLeaf(leaf, 0)
        own = like_marked(leaf.detach().requires_grad_(), leaf) if leaf.requires_grad else leaf
        return _KeptLeaf(own, version_of(own))

    def again(self) -> Any:
        """The leaf.

        Raises:
            RuntimeError: it was written to.
        """
        if isinstance(self.leaf, Tensor) and version_of(self.leaf) != self.version:
            raise RuntimeError(
                f"differentiable: a tensor of shape {list(self.leaf.shape)} of a batch or a state was written to in place "
                "since its step, which is computed again in the backward pass: pass a copy"
            )
        return self.leaf


@attrs.frozen(eq=False)
class _KeptShard:
    """This rank's piece of a tensor that is equal on all ranks.

    Attributes:
        piece: ``ceil(numel / n)`` elements.
        strides: restores the tensor's shape.
        model: the tensor without values, with its marks.
        numel: elements that the tensor has in memory.
        trains: whether it requires grad.
    """

    piece: Tensor
    strides: Any
    model: Tensor
    numel: int
    trains: bool

    @staticmethod
    def of(tensor: Tensor, group: comm.Group) -> "_KeptShard":
        flat, strides = compact(tensor)
        return _KeptShard(partition(flat, group).piece, strides, without_values(tensor), flat.numel(), tensor.requires_grad)

    def whole(self, flat: Tensor) -> Tensor:
        """The tensor, of all ranks' pieces."""
        return like_marked(self.strides.restore(flat[: self.numel]).requires_grad_(self.trains), self.model)


# -- what ranks sum ----------------------------------------------------------------------------------------------------


def of_first_rank(step: Step, params: Any) -> Any:
    """Rank 0's params on every rank; gradients by them are gradients by each rank's own.

    Raises:
        ValueError: the ranks' params differ in structure.
    """
    for axis in axes_of(step):
        check_same_leaves(params, axis.ranks())
        leaves, spec = tree.flatten(params)
        first = comm.broadcast([x.detach() for x in leaves], 0, axis.ranks())
        found = zip(Graft.of(leaves, list)(first), leaves, strict=True)
        params = tree.unflatten(spec, [like_marked(x, leaf) for x, leaf in found])
    return params


def entering(step: Step, params: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Params as each rank's loss uses them, whose gradients are summed over the ranks.

    Also returns a function for what a rank computes from them. It changes no value, and makes the sum a part of the graph on
    all ranks, also on one whose loss does not depend on the params.
    """
    leaves, spec = tree.flatten(params)
    token = torch.empty(0)
    for axis in axes_of(step):
        *found, token = comm.copy_to([*leaves, token], axis.ranks())
        leaves = [like_marked(x, leaf) for x, leaf in zip(found, leaves, strict=True)]

    def linked(x: Tensor) -> Tensor:
        return x + token.sum().to(x.dtype) if token.requires_grad and x.is_floating_point() else x

    return tree.unflatten(spec, leaves), linked


def reduced(step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
    """Sums gradients over the ranks."""
    return state, tree.replace(grads, sum=list(_summed(step, state, list(grads.sum))))


def _summed(step: Any, state: State, values: Any) -> Any:
    """Sums that all ranks use alike, so each rank already has the whole gradient by a sum."""
    for axis in axes_of(step):
        values = comm.reduce_from(values, axis.ranks())
    return values


# -- what is computed again --------------------------------------------------------------------------------------------


def replayed(function: Callable[[T], R], value: T, keep: Callable[[T], Callable[[], T]]) -> R:
    """``function(value)``, of which autograd keeps ``keep(value)`` until a backward pass computes the rest again.

    Law: value and all derivatives are the function's, also where it differentiates inside. Random draws are repeated. The graph
    itself stays, so gradients reach what the function takes by closure.

    Cost: another run of the function in the first backward pass through it, which then holds what one run saves.

    Args:
        function: computes the same again from the same value.
        value: a pytree.
        keep: stores a value, and returns a function that restores it without its graph; collective calls in it are matched if
            all ranks differentiate alike.

    Raises:
        RuntimeError: in the backward pass: the function saved other tensors when it ran again, or one was written to since.
    """
    return _Replay(function, keep(value)).first(value) if torch.is_grad_enabled() else function(value)


@attrs.define(eq=False)
class _Saved:
    """What one operation saved; without the tensor between the function's runs."""

    tensor: Tensor | None
    version: int
    form: tuple[torch.Size, torch.dtype]

    @staticmethod
    def of(tensor: Tensor) -> "_Saved":
        return _Saved(tensor.detach(), version_of(tensor), (tensor.shape, tensor.dtype))

    def get(self) -> Tensor:
        if self.tensor is None or version_of(self.tensor) != self.version:
            raise RuntimeError("differentiable: a tensor that a derivative needs was written to in place: return a new tensor")
        return self.tensor


@attrs.define(eq=False)
class _Replay:
    function: Callable[[Any], Any]
    restored: Callable[[], Any]
    _saved: list["weakref.ref[_Saved]"] = attrs.field(factory=list)  # in order; those that autograd has freed are dead
    _rng: RngState = attrs.field(factory=lambda: RngState.now().copies(1)[0])
    _drawn: tuple[torch.device, Tensor] | None = attrs.field(init=False)  # the device's generator

    def __attrs_post_init__(self) -> None:
        device = in_use()
        self._drawn = None if device is None else (device, rng_state(device))

    def first(self, value: Any) -> Any:
        """The first run, at whose end the saved tensors are dropped."""
        saved = []

        def pack(tensor: Tensor) -> _Saved:
            saved.append(_Saved.of(tensor))
            return saved[-1]

        try:
            with saved_tensors_hooks(pack, self._unpack):
                return self.function(value)
        finally:
            for one in saved:
                one.tensor = None
            self._saved = [weakref.ref(one) for one in saved]

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is None:
            self._again()
        return saved.get()

    def _again(self) -> None:
        """A run that fills what the first run has saved, and drops its results."""
        left = iter(self._saved)

        def pack(tensor: Tensor) -> _Saved:
            own, known = _Saved.of(tensor), next(left, lambda: None)()
            if known is not None:
                if known.form != own.form:
                    raise _differs(known.form, own.form)
                known.tensor, known.version = own.tensor, own.version
            return own

        with self._as_before(), torch.enable_grad(), saved_tensors_hooks(pack, _Saved.get):
            self.function(self.restored())
        if (missing := next((one() for one in left if one() is not None), None)) is not None:
            raise _differs(missing.form, "nothing")

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(kept_rng())
            if self._drawn is not None:
                stack.enter_context(redrawn(*self._drawn))
            self._rng.copies(1)[0].restore()
            yield


def _differs(first: Any, second: Any) -> RuntimeError:
    return RuntimeError(
        f"differentiable: this step is computed again in the backward pass, and its loss saved {second} where it had saved "
        f"{first}: let it depend on its arguments alone, and differentiate in the autocast context in which it ran"
    )
