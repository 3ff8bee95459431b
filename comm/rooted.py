"""Collectives with a root rank: reduce, gather, scatter."""

from typing import TypeVar

from torch import Tensor

from functional_ds.base import tree as pytree
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Request
from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.rooted_rows import GATHER, SCATTER
from functional_ds.comm.table.rows import REDUCE

from .api import reducing
from .calls.dispatch import collective, request, resolve_dim, resolve_group

T = TypeVar("T")


@collective
def reduce(x: T, dst: int = 0, group: Group | None = None, *, op: str = "sum") -> Request[T]:
    """Reduces the ranks' values elementwise to rank ``dst``; the other ranks get zeros.

    Law: the transpose of the sum is ``broadcast`` from ``dst``.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        dst: the rank of the group that gets the result.
        group: the ranks that take part; None for the whole world.
        op: "sum", "avg", "min", "max" or "product".

    Cost: every rank except ``dst`` sends its value once.

    Raises:
        ValueError: ``dst`` is not a rank of the group; ``op`` is unknown, or not defined for the dtype.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.reduce(torch.tensor(2), dst=1).item(), world_size=3)
    [0, 6, 0]
    """
    return reducing(Call(REDUCE, {"dst": dst, "op": op}), x, group)


@collective
def gather(x: T, dst: int = 0, group: Group | None = None, *, dim: int = 0, tiled: bool = True) -> Request[T]:
    """Gathers the ranks' values on rank ``dst``, concatenated along ``dim``.

    The other ranks get zeros of the same shape, which take no memory.

    Law: ``AG = BC(dst) ∘ gather(dst)``; the transpose is ``scatter`` from ``dst``.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        dst: the rank of the group that gets the result.
        group: the ranks that take part; None for the whole world.
        dim: the dim to concatenate along.
        tiled: False stacks the values on a new leading dim.

    Cost: every rank except ``dst`` sends its value once.

    Raises:
        ValueError: ``dst`` is not a rank of the group; ``dim`` is out of range.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.gather(torch.tensor([comm.world().rank + 1]), dst=1).tolist(), world_size=2)
    [[0, 0], [1, 2]]
    """
    return request(Call(GATHER, {"dst": dst, "dim": resolve_dim("gather", x, dim), "tiled": tiled}), x, group)


@collective
def scatter(
    x: T | None, src: int = 0, group: Group | None = None, *, dim: int = 0, tiled: bool = True, like: T | None = None
) -> Request[T]:
    """Splits rank ``src``'s value along ``dim``: rank r gets the r-th of n pieces.

    Law: ``RS = scatter(dst) ∘ reduce(dst)``; the transpose is ``gather`` to ``src``.

    Args:
        x: the whole value on rank ``src``. Other ranks pass one of the same shape, which is not read, or None with ``like``.
        src: the sender, a rank of the group.
        group: the ranks that take part; None for the whole world.
        dim: the dim to split.
        tiled: False splits a leading dim of size n and removes it.
        like: a pytree with the shapes and dtypes of a piece, for ranks that pass None. For gradients it must require grad.

    Cost: ``src`` sends (n - 1) / n of the value; with ``like``, no other rank holds more than its piece.

    Raises:
        ValueError: the size along ``dim`` is not a multiple of n; ``src`` is not a rank of the group; ``x`` is None on
            ``src``, or elsewhere without ``like``.

    >>> from functional_ds import comm
    >>> def program():
    ...     whole = torch.arange(4) if comm.world().rank == 0 else None
    ...     return comm.scatter(whole, like=torch.arange(2)).tolist()
    >>> comm.simulate(program, world_size=2)
    [[0, 1], [2, 3]]
    """
    group = resolve_group(group)
    if like is not None and group.rank != src:
        x = pytree.map(lambda leaf: _whole_of(leaf, group.size, dim, tiled), like)
    elif x is None:
        who = f"rank {src} is src and gives the whole" if group.rank == src else "pass like=, a tree shaped as what arrives"
        raise ValueError(f"scatter: x is None on rank {group.rank}; {who}")
    return request(Call(SCATTER, {"src": src, "dim": resolve_dim("scatter", x, dim), "tiled": tiled}), x, group)


def _whole_of(piece: Tensor, n: int, dim: int, tiled: bool) -> Tensor:
    """Zeros in the shape of the whole value, which take no memory."""
    shape = list(piece.shape)
    if not tiled:
        shape.insert(0, n)
    elif -len(shape) <= dim < len(shape):  # otherwise the call's check raises
        shape[dim] *= n
    if not piece.requires_grad:
        return piece.new_zeros(()).expand(shape)
    return piece.flatten()[:0].sum().expand(shape)  # zeros that require grad, so this rank takes part in the backward pass
