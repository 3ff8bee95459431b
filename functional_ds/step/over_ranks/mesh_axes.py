"""Mesh axes that transforms add to a step, as data, and what follows from them: sums, shards of batches, buffers."""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, Protocol

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.step.state.buffer_sync import synced
from functional_ds.step.state.state import State

from .sequence_rows import row_of


class AxisRole(Enum):
    """What the ranks of an axis divide; ``Step.has`` accepts it like a trait."""

    BATCH = "dp"  # rows: different ones on each rank, as in data parallelism
    SEQUENCE = "sp"  # positions of the same rows; an axis of role BATCH includes these ranks and sums over them
    STAGES = "pp"  # the model's stages; only the last has the loss
    EXPERTS = "ep"  # stacks of experts, and tokens by expert; an axis of role BATCH includes these ranks
    APART = "outer"  # nothing: each rank trains its own model, on its own batch
    MODEL = "tp"  # leaves, or what functions exchange, of one batch or of one that another axis divides


@attrs.frozen(eq=False)
class GradientParts:
    """How a gradient is divided over the ranks of an axis.

    Attributes:
        holders: how many ranks have the same part as this one, by the index of a trained tensor; 0 if another of them counts
            it.
        others: the same of all other tensors; None if they are whole on all ranks.
        counts: which such numbers occur in addition to 0, equal on all ranks of the step.
        dtype: the dtype of norms, if the dtypes of the ranks' tensors differ, as in the stages of a pipeline.
    """

    holders: Mapping[int, int] = attrs.field(factory=dict)
    others: int | None = 1
    counts: Sequence[int | None] = (1,)
    dtype: torch.dtype | None = None

    def only(self, grads: Sequence[Tensor], count: int | None) -> list[Tensor]:
        """The gradients of which exactly ``count`` ranks have the same part; others are emptied."""
        places = enumerate(grads)
        return [grad if self.holders.get(place, self.others) == count else grad.new_empty(0) for place, grad in places]


@attrs.frozen(eq=False)
class Axis:
    """The ranks of one mesh axis, and what a transform divides over them: ``wrap(..., axes=[Axis(group, AxisRole.BATCH)])``.

    From the axes of its transforms a step computes ``norm``, ``finite``, ``sum_over_ranks``, ``batch_shard`` and
    ``sync_buffers``.

    Attributes:
        group: the ranks, which compare the whole step at ``init``; None for the current world.
        role: what they divide.
        parts: (step, state) -> how the gradient that an update gets is divided; None, or a result of None, if it is the same on
            all ranks.
        summed_in: the phase that sums gradients over the ranks; "update" if the optimizer does.
        name: under which a model's functions get the axis, by ``axis(name)``; None if they need not.
        value: what ``axis(name)`` returns; None for the group.

    Raises:
        TypeError: ``group`` is not a ``comm.Group``.
    """

    group: comm.Group | None
    role: AxisRole = AxisRole.MODEL
    parts: Callable[[Any, State], GradientParts | None] | None = None
    summed_in: Literal["gradients", "reduce", "update"] = "gradients"
    name: str | None = None
    value: Any = None
    shards: dict[Any, tuple[int, int]] = attrs.field(factory=dict, init=False, repr=False)  # of SEQUENCE: shards of batches

    def __attrs_post_init__(self) -> None:
        if self.group is not None and not isinstance(self.group, comm.Group):
            raise TypeError(f"group={self.group!r} is not a group: pass mesh[{self.role.value!r}], comm.world() or None")

    def __str__(self) -> str:
        return "world" if self.group is None else f"{self.group.name!r} of {self.group.size}"

    def ranks(self) -> comm.Group:
        """The group, by default the current world."""
        return self.group or comm.world()

    @property
    def compares(self) -> bool:
        """Whether there are other ranks with real values to compare with."""
        return self.ranks().compares

    @property
    def sums(self) -> bool:
        """Whether metrics and weights are sums over its ranks."""
        return self.role in (AxisRole.BATCH, AxisRole.STAGES)


# -- what follows over all ranks ---------------------------------------------------------------------------------------


class Divided(Protocol):
    """The part of a step that defines how it is divided."""

    @property
    def layers(self) -> Sequence[Any]: ...

    def leaf_map(self, state: State) -> LeafMap: ...


def axes_of(step: Divided) -> list[Axis]:
    """The axes of its transforms, in the order of composition; of those that divide a batch, the outermost first."""
    return [axis for layer in step.layers for axis in layer.axes]


def micro_batches(step: Divided, state: State) -> int:
    """The product of the transforms' numbers of micro-batches."""
    return math.prod(layer.micro_batches for layer in step.layers)


def sum_over_ranks(step: Divided, state: State, scalars: Any) -> Any:
    """Sums over each axis that divides rows, and over stages, of which one has nonzero values."""
    axes = [axis for axis in axes_of(step) if axis.sums]
    if axes and comm.world().world.watch is not None:
        comm.varying(scalars)  # what all ranks have is summed n times, and so is its weight
    for axis in axes:
        scalars = comm.all_reduce(scalars, axis.ranks())
    return scalars


def sync_buffers(step: Divided, state: State) -> State:
    """Ranks with other rows agree by the step's policy; ranks of stages get each buffer from a rank that ran its module."""
    for axis in axes_of(step):
        if axis.sums:
            state = synced(state, axis.ranks(), policy="writer" if axis.role is AxisRole.STAGES else None)
    return state


# -- gradients ---------------------------------------------------------------------------------------------------------


# -- shards of batches -------------------------------------------------------------------------------------------------


def batch_shard(step: Divided, state: State) -> tuple[int, int]:
    """The place among the ranks that divide rows, without the axes along which they have the same rows.

    Raises:
        ValueError: gradients are not summed over an axis of sequences, or over a part of it.
    """
    index, count = 0, 1
    for axis in axes_of(step):
        if axis.role is AxisRole.BATCH:
            group = axis.ranks()
            index, count = index * group.size + group.rank, count * group.size
    for layer in step.layers:
        for axis in layer.axes:
            if axis.role is AxisRole.SEQUENCE:
                index, count = row_of(layer.name, axis.ranks(), index, count, known=axis.shards)
    return index, count


OVER_RANKS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {f.__name__: f for f in (batch_shard, micro_batches, sum_over_ranks, sync_buffers)}
)


class FollowsFromAxes:
    """The part of a step that is computed over all its ranks from the axes of its transforms.

    Attributes:
        layers: what each transform added.
        over_ranks: the functions, by the name of the method.
    """

    layers: Sequence[Any]
    over_ranks: Mapping[str, Callable[..., Any]]

    def _guard(self, call: str, *args: Any) -> None:
        raise NotImplementedError

    @property
    def sums(self) -> bool:
        """Whether ``sum_over_ranks`` sums over any other ranks."""
        return any(axis.sums for layer in self.layers for axis in layer.axes)

    def sum_over_ranks(self, state: State, scalars: Any) -> Any:
        """Scalars, summed over the ranks that share a batch."""
        return self.over_ranks["sum_over_ranks"](self, state, scalars)

    def norm(self, state: State, grads: list[Tensor]) -> Tensor:
        """The 2-norm of the whole gradient, over all ranks, replicas counted once."""
        self._guard("norm", state, grads)
        return self.over_ranks["norm"](self, state, grads)  # type: ignore[no-any-return]

    def dot(self, state: State, one: list[Tensor], other: list[Tensor]) -> Tensor:
        """The inner product of two lists like the trained tensors, over all ranks, replicas counted once."""
        self._guard("norm", state, one)
        return self.over_ranks["dot"](self, state, one, other)  # type: ignore[no-any-return]

    def per_leaf(self, state: State, function: Callable[..., Tensor], *lists: list[Tensor]) -> dict[str, Tensor]:
        """A sum over the elements of each leaf, over all ranks, by its path; one collective for all leaves.

        ``step.per_leaf(state, lambda g: g.square().sum(), grads.sum)`` gives the squared gradient norm of each leaf.

        Args:
            state: whose leaves; in a pipeline those of this stage.
            function: from a part of a leaf, a flat tensor of each list, to a sum over it; see ``LeafMap.sums``.
            lists: like the trained tensors.
        """
        self._guard("norm", state, lists[0] if lists else [])
        return self.over_ranks["per_leaf"](self, state, function, *lists)  # type: ignore[no-any-return]

    def finite(self, state: State, grads: list[Tensor]) -> Tensor:
        """Whether the whole gradient is finite, the same on every rank."""
        return self.over_ranks["finite"](self, state, grads)  # type: ignore[no-any-return]

    def sync_buffers(self, state: State) -> State:
        """The state with module buffers that are equal on all ranks."""
        return self.over_ranks["sync_buffers"](self, state)  # type: ignore[no-any-return]

    def batch_shard(self, state: State) -> tuple[int, int]:
        """``(index, count)``: which of how many equal shards of the global batch this rank has."""
        return self.over_ranks["batch_shard"](self, state)  # type: ignore[no-any-return]

    def micro_batches(self, state: State) -> int:
        """The number of micro-batches into which this step splits a rank's batch."""
        return self.over_ranks["micro_batches"](self, state)  # type: ignore[no-any-return]
