"""The collectives as functions: from a pytree to a new pytree, differentiable wherever a transpose exists.

Point-to-point messages are in ``p2p``, Python objects in ``objects``, Megatron's four in ``variance``.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor

from functional_ds.base import tree as pytree
from functional_ds.comm.record.collective import Call
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.permutation import Permutation
from functional_ds.comm.record.table import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_ROWS,
    BARRIER,
    BROADCAST,
    GATHER,
    PERMUTE,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)

from .dispatch import apply, flatten, is_differentiable, resolve_dim, resolve_group
from .uneven import all_gather_uneven, need_values

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "permute",
    "reduce",
    "reduce_scatter",
    "repeat",
    "scatter",
]

T = TypeVar("T")


def _reducing(call: Call, tree: T, group: Group | None, async_op: bool) -> Any:
    """avg is the sum over n, divided after the exchange, in every world alike."""
    if call.options["op"] != "avg":
        return apply(call, tree, group, async_op)
    group = resolve_group(group)
    for leaf in flatten(call.collective.name, tree)[0]:
        if not is_differentiable(leaf):
            raise ValueError(f"op='avg' of an integer or bool tensor ({leaf.dtype}): use sum, or cast it first")

    def divided(total: T) -> T:
        mean: T = pytree.map(lambda leaf: leaf / group.size, total)
        return mean

    total = apply(Call(call.collective, {**call.options, "op": "sum"}), tree, group, async_op)
    return total.then(divided) if async_op else divided(total)


def all_reduce(x: T, group: Group | None = None, *, op: str = "sum", async_op: bool = False) -> Any:
    """The ranks' values combined elementwise, on every rank.

    Law: ``AR = AG ∘ RS``; its own transpose for sums. The pieces combine in rank order, so Gloo and the simulator agree
    bit for bit.

    Args:
        x: a pytree of tensors with the same shapes and dtypes on all ranks.
        group: who takes part; None for the whole world.
        op: sum, avg, min, max or product.
        async_op: return a ``Pending`` at once.

    Cost: each rank sends 2 (n - 1) / n of the value.

    Raises:
        ValueError: an unknown op, or one that the dtype does not have.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.all_reduce(torch.tensor([1.0, comm.world().rank])).tolist(), world_size=3)
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    return _reducing(Call(ALL_REDUCE, {"op": op}), x, group, async_op)


def all_gather(
    x: T,
    group: Group | None = None,
    *,
    dim: int = 0,
    tiled: bool = True,
    uneven: bool = False,
    async_op: bool = False,
) -> Any:
    """The ranks' values concatenated along ``dim``, on every rank; ``tiled=False`` stacks them on a new leading axis.

    Law: ``AG ∘ shard = id``; the transpose is reduce_scatter.

    Args:
        x: a pytree of tensors with the same shapes and dtypes on all ranks.
        group: who takes part; None for the whole world.
        dim: where the values are joined.
        tiled: whether they are joined along an axis that they have.
        uneven: the sizes along ``dim`` may differ between ranks; they are exchanged first, and the host waits for that.
        async_op: return a ``Pending`` at once.

    Cost: each rank sends (n - 1) times its value; uneven, 16 (n - 1) bytes a leaf before it.

    Raises:
        ValueError: ``dim`` is out of range, or the value is a scalar and tiled.
        MismatchError: uneven values whose dtypes or other dims differ.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.all_gather(torch.tensor([comm.world().rank])).tolist(), world_size=3)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    >>> comm.simulate(lambda: comm.all_gather(torch.ones(comm.world().rank), uneven=True).tolist(), world_size=3)[0]
    [1.0, 1.0, 1.0]
    """
    dim = resolve_dim("all_gather", x, dim)
    if not uneven:
        return apply(Call(ALL_GATHER, {"dim": dim, "tiled": tiled}), x, group, async_op)
    if not tiled:
        raise ValueError("uneven=True with tiled=False: pieces of different sizes do not stack; gather them along a dim")
    pending = all_gather_uneven(x, resolve_group(group), dim)
    return pending if async_op else pending.wait()


def reduce_scatter(
    x: T,
    group: Group | None = None,
    *,
    dim: int = 0,
    op: str = "sum",
    tiled: bool = True,
    async_op: bool = False,
) -> Any:
    """The ranks' values combined elementwise and cut along ``dim``: rank r keeps the r-th of n pieces.

    Law: ``RS = shard ∘ AR``; the transpose of the sum is all_gather. ``tiled=False`` expects a leading axis of size n and
    drops it.

    Cost: each rank sends (n - 1) / n of the value.

    Raises:
        ValueError: the size along ``dim`` is no multiple of n; an unknown op.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.reduce_scatter(torch.arange(4)).tolist(), world_size=2)
    [[0, 2], [4, 6]]
    """
    options = {"dim": resolve_dim("reduce_scatter", x, dim), "op": op, "tiled": tiled}
    return _reducing(Call(REDUCE_SCATTER, options), x, group, async_op)


def broadcast(x: T, src: int = 0, group: Group | None = None, *, async_op: bool = False) -> Any:
    """Rank ``src``'s value, on every rank; the others pass a value of the same shapes and dtypes.

    Law: the transpose is ``reduce`` to ``src``. ``src`` counts within the group.

    Cost: ``src`` sends n - 1 times the value.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.broadcast(torch.tensor(comm.world().rank), src=1).item(), world_size=3)
    [1, 1, 1]
    """
    return apply(Call(BROADCAST, {"src": src}), x, group, async_op)


def reduce(x: T, dst: int = 0, group: Group | None = None, *, op: str = "sum", async_op: bool = False) -> Any:
    """The ranks' values combined elementwise, on rank ``dst``; zeros elsewhere.

    Law: the transpose of the sum is ``broadcast`` from ``dst``. ``dst`` counts within the group.

    Cost: every rank but ``dst`` sends its value once.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.reduce(torch.tensor(2), dst=1).item(), world_size=3)
    [0, 6, 0]
    """
    return _reducing(Call(REDUCE, {"dst": dst, "op": op}), x, group, async_op)


def gather(x: T, dst: int = 0, group: Group | None = None, *, dim: int = 0, tiled: bool = True, async_op: bool = False) -> Any:
    """The ranks' values concatenated along ``dim``, on rank ``dst``; elsewhere zeros of that shape, which take no memory.

    Law: ``AG = BC(dst) ∘ gather(dst)``; the transpose is ``scatter`` from ``dst``, which counts within the group.

    Cost: every rank but ``dst`` sends its value once.

    Raises:
        ValueError: ``dst`` is no rank of the group; ``dim`` is out of range.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.gather(torch.tensor([comm.world().rank + 1]), dst=1).tolist(), world_size=2)
    [[0, 0], [1, 2]]
    """
    return apply(Call(GATHER, {"dst": dst, "dim": resolve_dim("gather", x, dim), "tiled": tiled}), x, group, async_op)


def scatter(
    x: T,
    src: int = 0,
    group: Group | None = None,
    *,
    dim: int = 0,
    tiled: bool = True,
    like: T | None = None,
    async_op: bool = False,
) -> Any:
    """Rank ``src``'s value cut along ``dim``: rank r gets the r-th of n pieces.

    Law: ``RS = scatter(dst) ∘ reduce(dst)``; the transpose is ``gather`` to ``src``.

    Args:
        x: on rank ``src`` the whole; elsewhere its values are ignored, and with ``like`` it is not needed at all (None).
        src: who has it; counts within the group.
        group: who takes part; None for the whole world.
        dim: where it is cut.
        tiled: False cuts a leading axis of size n and drops it.
        like: a tree shaped as the piece that arrives, for ranks that do not hold the whole. Where gradients shall flow, it
            requires grad as ``x`` does.
        async_op: return a ``Pending`` at once.

    Cost: ``src`` sends (n - 1) / n of the value; no other rank holds more than its piece.

    Raises:
        ValueError: the size along ``dim`` is no multiple of n; ``src`` is no rank of the group, or has no value.

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
    return apply(Call(SCATTER, {"src": src, "dim": resolve_dim("scatter", x, dim), "tiled": tiled}), x, group, async_op)


def _whole_of(piece: Tensor, n: int, dim: int, tiled: bool) -> Tensor:
    """A stand-in for the whole that takes no memory."""
    shape = list(piece.shape)
    if not tiled:
        shape.insert(0, n)
    elif -len(shape) <= dim < len(shape):  # else the check will say so
        shape[dim] *= n
    if not piece.requires_grad:
        return piece.new_zeros(()).expand(shape)
    return piece.flatten()[:0].sum().expand(shape)  # zeros that carry gradients: through them this rank joins the backward


def all_to_all(
    x: T,
    group: Group | None = None,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Each rank cuts its value along ``split_dim`` and sends piece p to rank p; what arrives is joined along ``concat_dim``.

    Law: ``A2A(c, s) ∘ A2A(s, c) = id``; the transpose has the dims swapped. With splits, the transpose swaps the splits.

    Args:
        x: a pytree of tensors.
        group: who takes part; None for the whole world.
        split_dim: where the value is cut, into equal pieces or as ``input_splits`` says.
        concat_dim: where the pieces that arrive are joined; with splits it must be ``split_dim``.
        input_splits: how many rows go to each rank: the row exchange of expert parallelism.
        output_splits: how many rows come from each rank. Left out, they are exchanged first, and the host waits for that.
        async_op: return a ``Pending`` at once.

    Cost: each rank sends (n - 1) / n of its value; with splits, all rows but its own.

    Raises:
        ValueError: a size that does not divide, splits that do not add up, a dim out of range.
        MismatchError: in a simulation, and under ``checked()``: splits of two ranks that contradict each other.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.all_to_all(torch.arange(2) + 10 * comm.world().rank).tolist(), world_size=2)
    [[0, 10], [1, 11]]
    >>> def rows():
    ...     rank = comm.world().rank
    ...     return comm.all_to_all(torch.full((3,), rank), input_splits=[[1, 2], [3, 0]][rank]).tolist()
    >>> comm.simulate(rows, world_size=2)
    [[0, 1, 1, 1], [0, 0]]
    """
    split_dim, concat_dim = resolve_dim("all_to_all", x, split_dim), resolve_dim("all_to_all", x, concat_dim)
    if input_splits is None:
        if output_splits is not None:
            raise ValueError(f"output_splits={list(output_splits)} without input_splits: say what this rank sends, too")
        return apply(Call(ALL_TO_ALL, {"split_dim": split_dim, "concat_dim": concat_dim}), x, group, async_op)
    if split_dim != concat_dim:
        raise ValueError(f"split_dim={split_dim} and concat_dim={concat_dim}: with input_splits they must be the same")
    group = resolve_group(group)
    sent = _sizes("input_splits", input_splits)
    if len(sent) != group.size:
        raise ValueError(f"input_splits={list(sent)}: a group of {group.size} needs {group.size} sizes, one for each rank")
    if output_splits is None:
        need_values("all_to_all(input_splits=...)", group, "what others send; pass output_splits, too")
        output_splits = all_to_all(torch.tensor(sent, device=group.world.device), group).tolist()
    options = {"dim": split_dim, "input_splits": sent, "output_splits": _sizes("output_splits", output_splits)}
    return apply(Call(ALL_TO_ALL_ROWS, options), x, group, async_op)


def _sizes(name: str, splits: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(index(rows) for rows in splits)
    except TypeError:
        raise TypeError(f"{name}={splits!r}: one whole number of rows for each rank") from None


def permute(x: T, perm: Permutation | Iterable[tuple[int, int]], group: Group | None = None, *, async_op: bool = False) -> Any:
    """Each rank's value goes to the rank that ``perm`` names; a rank with no source gets zeros.

    Law: ``PM(p) ∘ PM(q) = PM(p ∘ q)``; the transpose is ``PM(p⁻¹)``.

    Args:
        x: a pytree of tensors with the same shapes and dtypes on all ranks.
        perm: pairs (source, destination) of ranks of the group, the same on all ranks. In loops, make a ``Permutation`` once.
        group: who takes part; None for the whole world.
        async_op: return a ``Pending`` at once.

    Cost: a rank with a destination sends its value once.

    Raises:
        ValueError: a rank is out of range, or stands twice on one side.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.permute(torch.tensor(comm.world().rank), [(0, 1), (1, 2)]).item(), world_size=3)
    [0, 0, 1]
    """
    perm = perm if isinstance(perm, Permutation) else Permutation(perm)
    return apply(Call(PERMUTE, {"perm": perm}), x, group, async_op)


def repeat(times: int, body: Callable[[int], None], group: Group | None = None) -> None:
    """``body(0)``, ``body(1)``, ..., each of which calls the same collectives on the same shapes.

    Law: ``repeat(k, body)`` is ``for i in range(k): body(i)``. On shapes only (``simulate(shapes_only=True)``) the body runs
    once and is counted k times, so that thousands of ranks can go through loops as long as there are ranks.

    Cost: k times the body's.

    >>> from functional_ds import comm
    >>> def around():
    ...     ring, x = comm.Permutation.shift(comm.world().size), [torch.empty(5, device="meta")]
    ...     with comm.ledger() as sent:
    ...         comm.repeat(999, lambda i: x.append(comm.permute(x.pop(), ring)))
    ...     return sent.calls, sent.elements
    >>> comm.simulate(around, world_size=1000, shapes_only=True)[7]
    (999, 4995)
    """
    if times < 0:
        raise ValueError(f"times={times}: a loop runs 0 times or more")
    resolve_group(group).world.repeat(times, body)


def barrier(group: Group | None = None) -> None:
    """Returns once every rank of the group has called it.

    >>> from functional_ds import comm
    >>> comm.simulate(comm.barrier, world_size=2)
    [None, None]
    """
    group = resolve_group(group)
    apply(Call(BARRIER), (torch.empty(0, device=group.world.device),), group, False)
