"""Norms and inner products of gradients over all ranks, each element counted once."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.torch_private import unscale_
from functional_ds.optim.kernels import reals, widest
from functional_ds.step.state.state import State

from .mesh_axes import Axis, AxisRole, Divided, GradientParts, axes_of


def norm(step: Divided, state: State, grads: list[Tensor]) -> Tensor:
    """‖g‖² = AR Σ ‖parts‖² / holders + ‖the rest‖² over each axis. Padding does not count.

    Raises:
        ValueError: the optimizer sums the gradients.
    """
    (grads,), dividing = _parts_of(step, state, grads)
    wide = _dtype(dividing, grads)
    if not dividing:
        return _norm(state, grads, wide)
    return _total(dividing, (grads,), lambda parts: _norm(state, parts, wide) ** 2).sqrt()


def dot(step: Divided, state: State, one: list[Tensor], other: list[Tensor]) -> Tensor:
    """⟨a, b⟩ = AR Σ ⟨parts of a, parts of b⟩ / holders + ⟨the rest⟩ over each axis. Padding does not count.

    Raises:
        ValueError: the lists do not line up; the optimizer sums the gradients.
    """
    sizes = [[x.numel() for x in tensors] for tensors in (one, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"step.dot: the lists have tensors of {sizes[0]} and {sizes[1]} elements; pass two that line up")
    rows, dividing = _parts_of(step, state, one, other)
    wide = _dtype(dividing, [*one, *other])
    return _total(dividing, rows, lambda a, b: _dot(state, a, b, wide))


def per_leaf(step: Divided, state: State, function: Callable[..., Tensor], *lists: list[Tensor]) -> dict[str, Tensor]:
    """``LeafMap.sums`` by path.

    Raises:
        ValueError: a leaf is split by tensor or expert parallelism; the optimizer sums the gradients.
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
    """Lists of tensors like the trained ones, without padding if axes divide them, and the axes that do."""
    _refuse_partial(step)
    axes = [axis for axis in axes_of(step) if axis.parts is not None]
    leaf_map = step.leaf_map(state) if axes else None
    rows = [tensors if leaf_map is None else leaf_map.without_padding(tensors) for tensors in lists]
    divided = [(axis, axis.parts(step, state)) for axis in axes if axis.parts is not None]
    return rows, [(axis, parts) for axis, parts in divided if parts is not None]


def _total(
    dividing: Sequence[tuple[Axis, GradientParts]], rows: Sequence[list[Tensor]], function: Callable[..., Tensor]
) -> Tensor:
    """A sum over elements, such as one of squares, over the parts of all ranks, each counted once."""
    if not dividing:
        return function(*rows)
    *inner, (axis, parts) = dividing
    sums = {count: _total(inner, [parts.only(row, count) for row in rows], function) for count in parts.counts}
    if parts.dtype is not None:
        total: Tensor = comm.all_reduce(sums[1].double(), axis.ranks())
        return total.to(parts.dtype)
    whole = [part for count, part in sums.items() if count is None]
    divided = [part / count if count > 1 else part for count, part in sums.items() if count is not None]
    if divided:
        whole.append(comm.all_reduce(functools.reduce(operator.add, divided), axis.ranks()))
    return functools.reduce(operator.add, whole)


def _dtype(dividing: Sequence[tuple[Axis, GradientParts]], tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of a norm on all ranks: fp64 if any tensor is fp64, else fp32."""
    return next((parts.dtype for _, parts in dividing if parts.dtype is not None), widest(tensors))


def _norm(state: State, grads: list[Tensor], wide: torch.dtype) -> Tensor:
    parts = reals(grads)
    if not parts:
        return state.step.new_zeros((), dtype=wide)
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in parts]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(wide) for norm in norms]))
    return total


def _dot(state: State, one: list[Tensor], other: list[Tensor], wide: torch.dtype) -> Tensor:
    left, right = reals(one), reals(other)
    if not left:
        return state.step.new_zeros((), dtype=wide)
    return torch.stack(
        [torch.dot(a.reshape(-1).to(wide), b.reshape(-1).to(wide)) for a, b in zip(left, right, strict=True)]
    ).sum()


def finite(step: Divided, state: State, grads: list[Tensor]) -> Tensor:
    """Whether the gradients are finite on this rank, and on all ranks of the axes that divide gradients.

    Models that train apart and meet in every k-th update skip a step together, so that all count the same updates.
    """
    meet = any(layer.periodic for layer in step.layers)
    axes = [
        axis
        for axis in axes_of(step)
        if axis.summed_in == "update" or (axis.parts and axis.parts(step, state)) or (meet and axis.role is AxisRole.APART)
    ]
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


GRADIENT_SUMS: Mapping[str, Callable[..., Any]] = MappingProxyType({f.__name__: f for f in (dot, finite, norm, per_leaf)})
