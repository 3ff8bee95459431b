"""Collectives with a root, whose value or result one rank has alone: reduce, gather, scatter."""

from typing import TypeVar

from torch import Tensor

from functional_ds.base import tree as pytree
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Request
from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.rooted_rows import GATHER, SCATTER
from functional_ds.comm.table.rows import REDUCE

from .api import reducing
from .dispatch import collective, request, resolve_dim, resolve_group

__all__ = ["gather", "reduce", "scatter"]

T = TypeVar("T")


@collective
def reduce(x: T, dst: int = 0, group: Group | None = None, *, op: str = "sum") -> Request[T]:
    """The ranks' values combined elementwise, on rank ``dst``; zeros on the other ranks.

    Law: the transpose of the sum is ``broadcast`` from ``dst``.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        dst: the rank within the group that gets the result.
        group: the ranks that take part; None for the whole world.
        op: "sum", "avg", "min", "max" or "product".

    Cost: every rank but ``dst`` sends its value once.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.reduce(torch.tensor(2), dst=1).item(), world_size=3)
    [0, 6, 0]
    """
    return reducing(Call(REDUCE, {"dst": dst, "op": op}), x, group)


@collective
def gather(x: T, dst: int = 0, group: Group | None = None, *, dim: int = 0, tiled: bool = True) -> Request[T]:
    """The ranks' values concatenated along ``dim``, on rank ``dst``.

    The other ranks get zeros of that shape, which take no memory.

    Law: ``AG = BC(dst) ∘ gather(dst)``; the transpose is ``scatter`` from ``dst``.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        dst: the rank within the group that gets the result.
        group: the ranks that take part; None for the whole world.
        dim: the dim to concatenate along.
        tiled: False stacks the values on a new leading axis instead.

    Cost: every rank but ``dst`` sends its value once.

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
    """Rank ``src``'s value cut along ``dim``: rank r gets the r-th of n pieces.

    Law: ``RS = scatter(dst) ∘ reduce(dst)``; the transpose is ``gather`` to ``src``.

    Args:
        x: on rank ``src`` the whole value. Its values on other ranks do not matter; with ``like`` they may pass None.
        src: the rank within the group that has the value.
        group: the ranks that take part; None for the whole world.
        dim: the dim to cut.
        tiled: False cuts a leading axis of size n, which each piece drops.
        like: a tree shaped as the piece that arrives, for ranks that do not have the whole. Where gradients shall flow, it
            requires grad as ``x`` does.

    Cost: ``src`` sends (n - 1) / n of the value; no other rank holds more than its piece.

    Raises:
        ValueError: the size along ``dim`` is not a multiple of n; ``src`` is not a rank of the group, or has no value.

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
    """Zeros shaped as the whole, which take no memory."""
    shape = list(piece.shape)
    if not tiled:
        shape.insert(0, n)
    elif -len(shape) <= dim < len(shape):  # else the check will say so
        shape[dim] *= n
    if not piece.requires_grad:
        return piece.new_zeros(()).expand(shape)
    return piece.flatten()[:0].sum().expand(shape)  # zeros that carry gradients: through them this rank joins the backward
