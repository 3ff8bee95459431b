"""What a program says of its values along a group of ranks. Each function returns its value as it is.

They cost nothing but the look whether anybody checks. In ``comm.simulate(..., variance=True)`` what they say is compared with
all ranks' bits, forward and backward, and followed through operations and collectives. The four kinds and their gradients are
those of ``Variance``, after the types of spmd_types (Meta, 2025).
"""

from typing import Any, TypeVar

from functional_ds.base import tree as pytree
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.variance import Variance

from .dispatch import flatten, resolve_group

__all__ = ["invariant", "partial", "replicated", "varying"]

T = TypeVar("T")


def _declare(kind: Variance, x: Any, group: Group | None, distinct: bool = False) -> None:
    group = resolve_group(group)
    watch = group.world.watch
    if watch is None or group.size == 1:
        return
    leaves = flatten(kind.value, x)[0]
    watch.declare(kind, leaves, group, [path for path, _ in pytree.named(x)], distinct=distinct)


def replicated(x: T, group: Group | None = None) -> T:
    """Says that all ranks have equal bits of ``x``, and that each uses it in its own way: its gradient is partial.

    Law 51: it holds iff all ranks' bits are equal. A gradient must be summed over the ranks before anything non-linear, or
    anything that all ranks have, meets it, an update of ``x`` included.

    Args:
        x: a pytree of tensors.
        group: the ranks; None for the whole world.

    Raises:
        VarianceError: when checked: values differ; names ranks, leaf, first element, both values and the line.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     return comm.replicated(torch.arange(3) * (comm.world().rank + 1)).tolist()
    >>> comm.simulate(program, world_size=2)  # nobody checks
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
    """Says that all ranks have equal bits of ``x``, and all the same gradient of it: they use it alike, or by ``copy_to``.

    Law 51: it holds iff all ranks' bits are equal, of ``x`` and of its gradient.

    Args:
        x: a pytree of tensors.
        group: the ranks; None for the whole world.

    Raises:
        VarianceError: when checked: values or gradients differ; names ranks, leaf, first element, both values and the line.

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
    """Says that each rank has its own ``x``, and its own gradient of it; equal bits are a matter of chance.

    What was known of the value before is forgotten, so this also takes a value back from an earlier claim.

    Args:
        x: a pytree of tensors.
        group: the ranks; None for the whole world.
        distinct: no two ranks have equal bits, as of dropout masks on slices.

    Raises:
        VarianceError: when checked, with ``distinct``: two ranks have equal bits; names them.
    """
    _declare(Variance.VARYING, x, group, distinct)
    return x


def partial(x: T, group: Group | None = None) -> T:
    """Says that ``x`` is one term of a sum over the ranks: only the sum means something, and all terms have one gradient.

    Law 51: what is linear may be done to terms, the same on all ranks; ``reduce_from`` or ``all_reduce`` makes the sum. Bits
    cannot tell a term from another value. What is checked is the use: nothing non-linear, no product of two, nothing added that
    all ranks have, no term that all ranks have by a claim; and the gradient's bits, which must be equal.

    Args:
        x: a pytree of tensors.
        group: the ranks; None for the whole world.

    Raises:
        VarianceError: when checked: a use that contradicts it, with its line; gradients that differ.

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
