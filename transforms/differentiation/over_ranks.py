"""Differentiable data parallelism: what ranks sum, and steps of which each rank keeps its part of the state."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import like_marked, without_values
from functional_ds.base.torch_private import in_dual_level, in_torch_func, version_of
from functional_ds.base.weighted import Weighted
from functional_ds.comm.graft import Graft
from functional_ds.remat.partitioned import partition
from functional_ds.remat.saved_tensors import compact
from functional_ds.step.guards import check_same_leaves
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole, axes_of
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Layer, Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .replay import replayed


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
