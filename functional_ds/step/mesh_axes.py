"""The mesh axes that transforms add to a step, as data, and what follows from them: norms, sums, shards of batches, buffers."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, Protocol

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.torch_private import unscale_
from functional_ds.optim.kernels import reals
from functional_ds.sharding.leaf_map import LeafMap

from .state.buffer_sync import synced
from .state.state import State

__all__ = ["OVER_RANKS", "Axis", "AxisRole", "FollowsFromAxes", "GradientParts", "axes_of"]


class AxisRole(Enum):
    """What the ranks of an axis divide; ``Step.has`` asks for it, as for a trait."""

    BATCH = "dp"  # rows: each rank has its own, as in data parallelism
    SEQUENCE = "sp"  # positions of the same rows; an axis of role BATCH has these ranks, too, and sums over them
    STAGES = "pp"  # the model's stages, of which the last alone has the loss
    EXPERTS = "ep"  # stacks of experts, and tokens by expert; the ranks are of an axis of role BATCH, too
    APART = "outer"  # nothing: each rank has a model of its own by design, and a batch for it
    MODEL = "tp"  # leaves, or what functions exchange, of one batch or of one that another axis divides


@attrs.frozen(eq=False)
class GradientParts:
    """How a gradient is divided over the ranks of an axis.

    Attributes:
        holders: how many ranks have the same part as this one, by the place of a trained tensor; 0 where another of them counts
            it.
        others: the same of all other tensors; None where they are whole on all ranks.
        counts: which such numbers there are beside 0, on all ranks of the step alike.
    """

    holders: Mapping[int, int] = attrs.field(factory=dict)
    others: int | None = 1
    counts: Sequence[int | None] = (1,)

    def only(self, grads: Sequence[Tensor], count: int | None) -> list[Tensor]:
        """The gradients of which so many ranks have the same part; others are emptied."""
        places = enumerate(grads)
        return [grad if self.holders.get(place, self.others) == count else grad.new_empty(0) for place, grad in places]


@attrs.frozen(eq=False)
class Axis:
    """The ranks of one axis, and what a transform divides over them: ``wrap(..., axes=[Axis(group, AxisRole.BATCH)])``.

    From the axes of its transforms a step computes whatever concerns several ranks: ``norm``, ``finite``, ``sum_over_ranks``,
    ``batch_shard`` and ``sync_buffers``.

    Attributes:
        group: the ranks; None for the world in which the program runs. They compare the whole step at ``init``.
        role: what they divide.
        parts: (step, state) -> how the gradient that an update gets is divided; None, or a result of None, where it is the same
            on all ranks.
        summed_in: the phase that sums gradients over the ranks; "update" where the optimizer does.
        name: under which a model's functions find the axis, by ``axis(name)``; None where they need not.
        value: what they find there; None for the group.

    Raises:
        TypeError: ``group`` is no group.
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
            raise TypeError(f"group={self.group!r} is no group: pass mesh[{self.role.value!r}], comm.world() or None")

    def __str__(self) -> str:
        return "world" if self.group is None else f"{self.group.name!r} of {self.group.size}"

    def ranks(self) -> comm.Group:
        """The group; the default is wherever the program runs."""
        return self.group or comm.world()

    @property
    def compares(self) -> bool:
        """Whether there are other ranks with values of their own, with which this one's can be compared."""
        group = self.ranks()
        return group.size > 1 and not comm.is_symmetric(group)

    @property
    def sums(self) -> bool:
        """Whether metrics and weights are sums over its ranks."""
        return self.role in (AxisRole.BATCH, AxisRole.STAGES)


# -- what follows over all ranks ---------------------------------------------------------------------------------------


class Divided(Protocol):
    """The part of a step that says how it is divided."""

    @property
    def layers(self) -> Sequence[Any]: ...

    def leaf_map(self, state: State) -> LeafMap: ...


def axes_of(step: Divided) -> list[Axis]:
    """The axes of its transforms, in the order of composition: of those that divide a batch, the outermost first."""
    return [axis for layer in step.layers for axis in layer.axes]


def micro_batches(step: Divided, state: State) -> int:
    """The product of what the transforms say."""
    return math.prod(layer.micro_batches for layer in step.layers)


def sum_over_ranks(step: Divided, state: State, scalars: Any) -> Any:
    """Over each axis that divides rows, and over stages, of which one has values that are not zero."""
    axes = [axis for axis in axes_of(step) if axis.sums]
    if axes and comm.world().world.watch is not None:
        comm.varying(scalars)  # what all ranks have counts n times, and so does its weight
    for axis in axes:
        scalars = comm.all_reduce(scalars, axis.ranks())
    return scalars


def sync_buffers(step: Divided, state: State) -> State:
    """Ranks with other rows agree as the step's policy says; ranks of stages have the buffers of all, each from who ran it."""
    for axis in axes_of(step):
        if axis.sums:
            state = synced(state, axis.ranks(), policy="writer" if axis.role is AxisRole.STAGES else None)
    return state


# -- gradients ---------------------------------------------------------------------------------------------------------


def norm(step: Divided, state: State, grads: list[Tensor]) -> Tensor:
    """‖g‖² = AR Σ ‖parts‖² / holders + ‖the rest‖² over each axis (law 27). Padding does not count.

    Raises:
        ValueError: the optimizer sums the gradients.
    """
    (grads,), dividing = _parts_of(step, state, grads)
    if not dividing:
        return _norm(state, grads)
    return _total(dividing, (grads,), lambda parts: _norm(state, parts) ** 2).sqrt()


def dot(step: Divided, state: State, one: list[Tensor], other: list[Tensor]) -> Tensor:
    """⟨a, b⟩ = AR Σ ⟨parts of a, parts of b⟩ / holders + ⟨the rest⟩ over each axis. Padding does not count.

    Raises:
        ValueError: the lists do not line up; the optimizer sums the gradients.
    """
    sizes = [[x.numel() for x in each] for each in (one, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"step.dot: the lists have tensors of {sizes[0]} and {sizes[1]} elements; pass two that line up")
    rows, dividing = _parts_of(step, state, one, other)
    return _total(dividing, rows, lambda a, b: _dot(state, a, b))


def per_leaf(step: Divided, state: State, function: Callable[..., Tensor], *lists: list[Tensor]) -> dict[str, Tensor]:
    """``LeafMap.sums`` by path.

    Raises:
        ValueError: a leaf is cut by tensor or expert parallelism; the optimizer sums the gradients.
    """
    _refuse_partial(step)
    leaf_map = step.leaf_map(state)
    leaf_map.refuse_slices("step.per_leaf", instead="use step.dot or step.norm, which sum over slices, too")
    return dict(zip((leaf.path for leaf in leaf_map.leaves), leaf_map.sums(function, *lists), strict=True))


def _refuse_partial(step: Divided) -> None:
    partial = next((layer.name for layer in step.layers for axis in layer.axes if axis.summed_in == "update"), None)
    if partial is not None:
        raise ValueError(f"{partial}: no rank has the whole gradient, so it has no norm, and clip cannot be used ({step})")


def _parts_of(step: Divided, state: State, *lists: list[Tensor]) -> tuple[list[list[Tensor]], list[tuple[Axis, GradientParts]]]:
    """Lists of tensors like the trained ones, without padding where axes may divide them, and the axes that do."""
    _refuse_partial(step)
    axes = [axis for axis in axes_of(step) if axis.parts is not None]
    leaf_map = step.leaf_map(state) if axes else None
    rows = [each if leaf_map is None else leaf_map.without_padding(each) for each in lists]
    found = [(axis, axis.parts(step, state)) for axis in axes if axis.parts is not None]
    return rows, [(axis, parts) for axis, parts in found if parts is not None]


def _total(
    dividing: Sequence[tuple[Axis, GradientParts]], rows: Sequence[list[Tensor]], function: Callable[..., Tensor]
) -> Tensor:
    """A sum over elements, such as one of squares, over the parts of all ranks, each counted once."""
    if not dividing:
        return function(*rows)
    *inner, (axis, parts) = dividing
    sums = {count: _total(inner, [parts.only(row, count) for row in rows], function) for count in parts.counts}
    if axis.role is AxisRole.STAGES:  # these may differ in their widest dtype
        total: Tensor = comm.all_reduce(sums[1].double(), axis.ranks())
        return total.to(sums[1].dtype)
    whole = [part for count, part in sums.items() if count is None]
    divided = [part / count if count > 1 else part for count, part in sums.items() if count is not None]
    if divided:
        whole.append(comm.all_reduce(functools.reduce(operator.add, divided), axis.ranks()))
    return functools.reduce(operator.add, whole)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """fp32, or fp64 where a tensor is."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def _norm(state: State, grads: list[Tensor]) -> Tensor:
    """In fp32, or in fp64 where a gradient is."""
    parts = reals(grads)
    if not parts:
        return state.step.new_zeros((), dtype=torch.float32)
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in parts]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(_widest(parts)) for norm in norms]))
    return total


def _dot(state: State, one: list[Tensor], other: list[Tensor]) -> Tensor:
    """In fp32, or in fp64 where a tensor is."""
    left, right = reals(one), reals(other)
    if not left:
        return state.step.new_zeros((), dtype=torch.float32)
    wide = _widest([*left, *right])
    return torch.stack(
        [torch.dot(a.reshape(-1).to(wide), b.reshape(-1).to(wide)) for a, b in zip(left, right, strict=True)]
    ).sum()


def finite(step: Divided, state: State, grads: list[Tensor]) -> Tensor:
    """Finite on this rank, and on all ranks of the axes that divide gradients."""
    axes = [axis for axis in axes_of(step) if axis.summed_in == "update" or (axis.parts and axis.parts(step, state))]
    for axis in axes:
        if axis.summed_in == "update":
            comm.varying(grads, axis.ranks())
    everywhere = _finite(state, grads)
    for axis in axes:
        everywhere = comm.all_reduce(everywhere, axis.ranks(), op="min")
    return everywhere


def _finite(state: State, grads: list[Tensor]) -> Tensor:
    device = grads[0].device if grads else state.step.device
    overflow, one = torch.zeros(1, device=device), torch.ones(1, device=device)
    if some := [grad for grad in reals(grads) if grad.numel()]:
        with torch.no_grad():  # one kernel, which multiplies by one in place: an expanded gradient would overlap itself
            apart = [grad.contiguous() if 0 in grad.stride() else grad for grad in some]
            unscale_(apart, overflow, one)
    return overflow[0] == 0


# -- shards of batches -------------------------------------------------------------------------------------------------


def batch_shard(step: Divided, state: State) -> tuple[int, int]:
    """The place among the ranks that divide rows, without the axes along which these have the same rows.

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
                index, count = _row(layer.name, axis, index, count)
    return index, count


def _row(name: str, axis: Axis, index: int, count: int) -> tuple[int, int]:
    """The shard of ranks that have the same rows as those beside them along an axis."""
    group = axis.ranks()
    control = group.channel("control")
    if group.size == 1:
        return index, count
    if comm.is_symmetric(control) and count % group.size == 0:  # which row it is makes no difference without values
        return index % (count // group.size), count // group.size
    key = (group, index, count)
    if key not in axis.shards:
        mine = torch.tensor([index], device=control.world.device)
        axis.shards[key] = _without(name, comm.all_gather(mine, control).tolist(), count, group)
    return axis.shards[key]


def _without(name: str, places: list[int], count: int, group: comm.Group) -> tuple[int, int]:
    """From the ranks' places in the global batch: this rank's row and how many rows there are, if the group is an axis."""
    stride, size = places[1] - places[0], len(places)
    even = stride > 0 and places == [places[0] + i * stride for i in range(size)]
    if not even or count % (stride * size) or places[0] // stride % size:
        raise ValueError(
            f"{name}: the step sums gradients over {count} ranks, among which those of group {group.name!r} have the "
            f"places {places}; they must be an axis of them, so that each token counts once: compose it with zero(k, "
            f"mesh['dp', 'sp']), or with zero(k, mesh['sp']) where there is no other axis"
        )
    return places[0] // (stride * size) * stride + places[0] % stride, count // size


OVER_RANKS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {f.__name__: f for f in (batch_shard, dot, finite, micro_batches, norm, per_leaf, sum_over_ranks, sync_buffers)}
)


class FollowsFromAxes:
    """The part of a step that it computes over all its ranks from the axes of its transforms.

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
        """The 2-norm of the whole gradient, replicas counted once."""
        self._guard("norm", state, grads)
        return self.over_ranks["norm"](self, state, grads)  # type: ignore[no-any-return]

    def dot(self, state: State, one: list[Tensor], other: list[Tensor]) -> Tensor:
        """The inner product of two lists like the trained tensors, over all ranks, replicas counted once."""
        self._guard("norm", state, one)
        return self.over_ranks["dot"](self, state, one, other)  # type: ignore[no-any-return]

    def per_leaf(self, state: State, function: Callable[..., Tensor], *lists: list[Tensor]) -> dict[str, Tensor]:
        """A sum over the elements of each leaf, over all ranks, by its path; one collective for all leaves.

        ``step.per_leaf(state, lambda g: g.square().sum(), grads.sum)`` has the square of each leaf's gradient norm.

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
        """The state with the module buffers that ranks with other rows agree on."""
        return self.over_ranks["sync_buffers"](self, state)  # type: ignore[no-any-return]

    def batch_shard(self, state: State) -> tuple[int, int]:
        """Which of how many equal parts of the global batch this rank has."""
        return self.over_ranks["batch_shard"](self, state)  # type: ignore[no-any-return]

    def micro_batches(self, state: State) -> int:
        """Into how many micro-batches this step cuts a rank's batch."""
        return self.over_ranks["micro_batches"](self, state)  # type: ignore[no-any-return]
