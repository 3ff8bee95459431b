"""What a step computes over all its ranks, from the axes of its transforms: norms, sums, shards of batches, buffers."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.torch_private import unscale_
from functional_ds.optim.kernels import reals

from .mesh_axes import Axis, AxisRole
from .state.buffer_sync import synced
from .state.state import State

if TYPE_CHECKING:
    from .step import Step

__all__ = ["OVER_RANKS", "axes_of"]


def axes_of(step: "Step") -> list[Axis]:
    """The axes of its transforms, in the order of composition: of those that divide a batch, the outermost first."""
    return [axis for layer in step.layers for axis in layer.axes]


def micro_batches(step: "Step", state: State) -> int:
    """The product of what the transforms say."""
    return math.prod(layer.micro_batches for layer in step.layers)


def sum_over_ranks(step: "Step", state: State, scalars: Any) -> Any:
    """Over each axis that divides rows, and over stages, of which one has values that are not zero."""
    axes = [axis for axis in axes_of(step) if axis.sums]
    if axes:
        comm.varying(scalars)  # what all ranks have counts n times, and so does its weight
    for axis in axes:
        scalars = comm.all_reduce(scalars, axis.ranks())
    return scalars


def sync_buffers(step: "Step", state: State) -> State:
    """Ranks with other rows agree as the step's policy says; ranks of stages have the buffers of all, each from who ran it."""
    for axis in axes_of(step):
        if axis.sums:
            state = synced(state, axis.ranks(), policy="writer" if axis.role is AxisRole.STAGES else None)
    return state


# -- gradients ---------------------------------------------------------------------------------------------------------


def norm(step: "Step", state: State, grads: list[Tensor]) -> Tensor:
    """‖g‖² = AR Σ ‖parts‖² / holders + ‖the rest‖² over each axis (law 27). Padding does not count.

    Raises:
        ValueError: the optimizer sums the gradients.
    """
    partial = next((layer.name for layer in step.layers for axis in layer.axes if axis.summed_in == "update"), None)
    if partial is not None:
        raise ValueError(f"{partial}: no rank has the whole gradient, so it has no norm, and clip cannot be used ({step})")
    axes = [axis for axis in axes_of(step) if axis.parts is not None]
    return _norm_over(step, state, step.leaf_map(state).without_padding(grads) if axes else grads, axes)


def _norm_over(step: "Step", state: State, grads: list[Tensor], axes: Sequence[Axis]) -> Tensor:
    if not axes:
        return _norm(state, grads)
    *inner, axis = axes
    parts = None if axis.parts is None else axis.parts(step, state)
    if parts is None:
        return _norm_over(step, state, grads, inner)
    norms = {count: _norm_over(step, state, parts.only(grads, count), inner) for count in parts.counts}
    if axis.role is AxisRole.STAGES:  # these may differ in their widest dtype
        total: Tensor = comm.all_reduce(norms[1].double() ** 2, axis.ranks()).sqrt()
        return total.to(norms[1].dtype)
    whole = [norm**2 for count, norm in norms.items() if count is None]
    divided = [norm**2 / count if count > 1 else norm**2 for count, norm in norms.items() if count is not None]
    if divided:
        whole.append(comm.all_reduce(functools.reduce(operator.add, divided), axis.ranks()))
    return functools.reduce(operator.add, whole).sqrt()


def _norm(state: State, grads: list[Tensor]) -> Tensor:
    """In fp32, or in fp64 where a gradient is."""
    parts = reals(grads)
    if not parts:
        return state.step.new_zeros((), dtype=torch.float32)
    widest = functools.reduce(torch.promote_types, (g.dtype for g in parts), torch.float32)
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in parts]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(widest) for norm in norms]))
    return total


def finite(step: "Step", state: State, grads: list[Tensor]) -> Tensor:
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


def batch_shard(step: "Step", state: State) -> tuple[int, int]:
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
    {f.__name__: f for f in (batch_shard, finite, micro_batches, norm, sum_over_ranks, sync_buffers)}
)
