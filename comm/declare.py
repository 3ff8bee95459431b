"""Declares whether a value is replicated, invariant, varying or a partial sum along a group; returns the value unchanged.

Declarations do nothing unless they are checked. ``comm.simulate(..., variance=True)`` compares them with the bits on all ranks,
forward and backward, and propagates them through operations and collectives. ``Variance`` defines the four, which follow
spmd_types (Meta, 2025).
"""

from typing import Any, TypeVar

from functional_ds.base import tree as pytree
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Variance

from .calls.dispatch import flatten, resolve_group

T = TypeVar("T")


def _declare(variance: Variance, x: Any, group: Group | None, distinct: bool = False) -> None:
    group = resolve_group(group)
    watch = group.world.watch
    if watch is None or group.size == 1:
        return
    leaves = flatten(variance.value, x)[0]
    watch.declare(variance, leaves, group, [path for path, _ in pytree.named(x)], distinct=distinct)


def replicated(x: T, group: Group | None = None) -> T:
    """Declares that ``x`` is bitwise equal on all ranks and used differently by each, so its gradient is a partial sum.

    Law: the declaration holds iff the bits are equal on all ranks. The gradient must be summed over the ranks before a
    non-linear operation, or before it is combined with a replicated value, as in an update of ``x``.

    Args:
        x: a pytree of tensors.
        group: the ranks; None for the whole world.

    Raises:
        VarianceError: when checked, if values differ; names ranks, leaf, first element, both values and the line.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     return comm.replicated(torch.arange(3) * (comm.world().rank + 1)).tolist()
    >>> comm.simulate(program, world_size=2)  # not checked
    [[0, 1, 2], [0, 2, 4]]
    >>> comm.simulate(program, world_size=2, variance=True)
    Traceback (most recent call last):
        ...
    functional_ds.comm.table.errors.VarianceError: int64[3], replicated along group 'world' [0, 1], by ..., differs between its
    ranks: element [1] is 1 on rank 0 and 2 on rank 1, as do 2 of 3 elements...
    """
    _declare(Variance.REPLICATED, x, group)
    return x


def invariant(x: T, group: Group | None = None) -> T:
    """Declares that ``x`` and its gradient are bitwise equal on all ranks: all use it in the same way, or through ``copy_to``.

    Law: the declaration holds iff the bits of ``x`` and of its gradient are equal on all ranks.

    Args:
        x: a pytree of tensors.
        group: the ranks; None for the whole world.

    Raises:
        VarianceError: when checked, if values or gradients differ; names ranks, leaf, first element, both values and the line.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program(use):
    ...     w = torch.ones(1, requires_grad=True)
    ...     (use(comm.invariant(w)) * comm.world().rank).sum().backward()
    ...     return w.grad.item()
    >>> comm.simulate(program, comm.copy_to, world_size=3, variance=True)
    [3.0, 3.0, 3.0]
    >>> comm.simulate(program, lambda w: w, world_size=3, variance=True)
    Traceback (most recent call last):
        ...
    functional_ds.comm.table.errors.VarianceError: the gradient of float32[1], invariant along group 'world' [0, 1, 2], by ...,
    differs between its ranks: element [0] is 0.0 on rank 0 and 1.0 on rank 1, as do 1 of 1 elements; ...
    """
    _declare(Variance.INVARIANT, x, group)
    return x


def varying(x: T, group: Group | None = None, *, distinct: bool = False) -> T:
    """Declares that ``x`` and its gradient may differ between ranks.

    This replaces earlier declarations of the value and anything inferred about it.

    Args:
        x: a pytree of tensors.
        group: the ranks; None for the whole world.
        distinct: the values must differ between any two ranks, as dropout masks of slices must.

    Raises:
        VarianceError: when checked with ``distinct``, if two ranks hold equal bits; names them.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program(mask):
    ...     return comm.varying(mask(), distinct=True).tolist()
    >>> comm.simulate(program, lambda: torch.arange(2) + comm.world().rank, world_size=2, variance=True)
    [[0, 1], [1, 2]]
    >>> comm.simulate(program, lambda: torch.arange(2), world_size=2, variance=True)
    Traceback (most recent call last):
        ...
    functional_ds.comm.table.errors.VarianceError: ...
    """
    _declare(Variance.VARYING, x, group, distinct)
    return x


def partial(x: T, group: Group | None = None) -> T:
    """Declares that ``x`` is a partial sum: the value is the sum over the ranks, and all ranks have the same gradient.

    Law: linear operations, the same on all ranks, commute with the sum, which ``reduce_from`` or ``all_reduce`` computes. The
    bits do not show whether a value is partial, so its uses are checked: non-linear operations, products of two partial sums,
    additions of replicated values and contradicting declarations are errors. The gradient must be bitwise equal on all ranks.

    Args:
        x: a pytree of tensors.
        group: the ranks; None for the whole world.

    Raises:
        VarianceError: when checked, if a use contradicts the declaration (names its line) or gradients differ.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     x = comm.partial(torch.ones(2) * comm.world().rank)
    ...     x = torch.relu(x)
    ...     return comm.reduce_from(x)
    >>> comm.simulate(program, world_size=2, variance=True)
    Traceback (most recent call last):
        ...
    functional_ds.comm.table.errors.VarianceError: relu at ... is not linear, and acts on a partial sum along group 'world'
    [0, 1] (partial since comm.partial at ...); sum it first, with comm.reduce_from or comm.all_reduce
    """
    _declare(Variance.PARTIAL, x, group)
    return x
