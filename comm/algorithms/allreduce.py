"""All-reduce algorithms on point-to-point messages: ring, trees, recursive doubling, halving-doubling, hierarchical.

Each computes ``comm.all_reduce`` with another order of reduction: equal for integers, min and max, within rounding otherwise,
and bitwise equal on all ranks. Sums and averages are differentiable; the transpose is the algorithm itself.

Partial results have the leaf's dtype, so in half precision each addition rounds, log2 n times along a tree and n - 1 times
around a ring, while ``comm.all_reduce`` accumulates in fp32 and rounds once.

The leaves of one dtype and device are sent as one payload of N bytes, in pieces that are padded to equal sizes, so the costs
below hold for sizes that divide. Latency is α seconds and bandwidth 1/β bytes per second; see ``comm.algorithms.cost``.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from functional_ds.base import tree as pytree
from functional_ds.comm.api import repeat
from functional_ds.comm.calls.dispatch import check_avg, flatten, resolve_group
from functional_ds.comm.composed import composed
from functional_ds.comm.declare import varying
from functional_ds.comm.exchange import permute
from functional_ds.comm.graft import Graft
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import CallContext
from functional_ds.comm.table.packing import by_kind
from functional_ds.comm.table.permutation import Permutation
from functional_ds.comm.table.rows import ALL_REDUCE

from .trees import combined, cut, in_order, joined, role_in, second, through

T = TypeVar("T")
Total = Callable[[Tensor, str], Tensor]  # from a flat payload and an op to the reduced payload


# -- trees of tensors, and gradients ----------------------------------------------------------------------------------


def _all_reduce(name: str, x: T, total: Total, op: str, *groups: Group) -> T:
    """Applies ``total`` to the leaves of ``x``, one payload for each dtype and device."""
    for group in groups:
        varying(x, group)  # the messages carry the terms of a partial sum
    leaves, spec = flatten(name, x)
    plain = "sum" if op == "avg" else op
    n = math.prod(group.size for group in groups)
    for leaf in leaves:
        ALL_REDUCE.check(leaf, CallContext({"op": plain}, 0, n))
    check_avg(leaves, op)
    results = _run(name, total, plain, leaves)
    if op == "avg":
        results = [result / n for result in results]
    reduced: T = pytree.unflatten(spec, results)
    return reduced


def _run(name: str, total: Total, op: str, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The reduced leaves; the transpose is the same all-reduce, which is differentiable again."""

    def back(grads: list[Tensor]) -> list[Tensor]:
        if op != "sum":
            raise ValueError(f"{name}(op={op!r}) has no transpose, so no gradient flows through it: detach its input")
        return _run(name, total, op, grads)

    graft = Graft.of(leaves, back)
    with torch.no_grad():
        totals = _coalesced(lambda flat: total(flat, op), leaves)
    return graft(totals)


def _coalesced(total: Callable[[Tensor], Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Reduces the leaves of one dtype and device as one payload, which is equal to reducing each."""
    results = list(leaves)
    for places in by_kind(leaves):
        reduced = total(torch.cat([leaves[i].reshape(-1) for i in places]))
        pieces = reduced.split([leaves[i].numel() for i in places])
        for i, piece in zip(places, pieces, strict=True):
            results[i] = (piece.clone() if len(places) > 1 else piece).reshape(leaves[i].shape)
    return results


# -- ring ---------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _around(n: int) -> Permutation:
    return Permutation.shift(n)


def _reduce_around(pieces: list[Tensor], group: Group, op: str) -> int:
    """Reduce-scatter around the ring; returns the index of the piece that this rank has reduced."""
    n, rank, perm = group.size, group.rank, _around(group.size)

    def step(i: int) -> None:
        received = permute(pieces[(rank - i) % n], perm, group)
        at = (rank - i - 1) % n
        pieces[at] = combined(received, pieces[at], op)

    repeat(n - 1, step, group)
    return (rank + 1) % n


def _pass_around(pieces: list[Tensor], group: Group) -> None:
    """All-gather around the ring."""
    n, rank, perm = group.size, group.rank, _around(group.size)

    def step(i: int) -> None:
        pieces[(rank - i) % n] = permute(pieces[(rank - i + 1) % n], perm, group)

    repeat(n - 1, step, group)


@composed
def ring(x: T, group: Group | None = None, *, op: str = "sum") -> T:
    """Ring all-reduce: a reduce-scatter and an all-gather around a ring.

    Law: ``ring = AR``. It sends the minimal number of bytes; its latency is linear in n.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        op: "sum", "avg", "min", "max" or "product".

    Cost: 2 (n - 1) α + 2 (n - 1) / n N β; each rank sends 2 (n - 1) messages of N / n.

    Source: Patarasuk & Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.

    Raises:
        ValueError: ``op`` is unknown, or not defined for the dtype.

    >>> from functional_ds import comm
    >>> from functional_ds.comm import algorithms
    >>> comm.simulate(lambda: algorithms.ring(torch.arange(4) * comm.world().rank).tolist(), world_size=3)
    [[0, 3, 6, 9], [0, 3, 6, 9], [0, 3, 6, 9]]
    """
    group = resolve_group(group)

    def total(flat: Tensor, op: str) -> Tensor:
        pieces = cut(flat, group.size)
        _reduce_around(pieces, group, op)
        _pass_around(pieces, group)
        return joined(pieces, flat)

    return _all_reduce("ring", x, total, op, group)


# -- trees --------------------------------------------------------------------------------------------------------------


@composed
def tree(x: T, group: Group | None = None, *, op: str = "sum", chunks: int = 1) -> T:
    """Tree all-reduce: a reduction up a binary tree and a broadcast down it.

    Law: ``tree = AR``, for any ``chunks``. Its latency is logarithmic in n.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        op: "sum", "avg", "min", "max" or "product".
        chunks: the number of pieces that are pipelined through the tree.

    Cost: 2 ⌈log2 n⌉ α + 4 N β with many chunks (with one, each level transfers the whole value in turn). A rank sends a
    message of N / chunks per neighbour and chunk, and has at most three neighbours.

    Source: the binary tree of Sanders, Speck & Träff 2009, in the numbering of NCCL 2.4.

    Raises:
        ValueError: ``op`` is unknown, or not defined for the dtype; ``chunks`` is less than 1.

    >>> from functional_ds import comm
    >>> from functional_ds.comm import algorithms
    >>> comm.simulate(lambda: algorithms.tree(torch.tensor([1, comm.world().rank]), op="max").tolist(), world_size=3)
    [[1, 2], [1, 2], [1, 2]]
    """
    group = resolve_group(group)
    role = role_in([in_order(group.size, group.rank)])
    return _all_reduce("tree", x, through(1, role, chunks, group), op, group)


@composed
def double_tree(x: T, group: Group | None = None, *, op: str = "sum", chunks: int = 1) -> T:
    """Double-tree all-reduce: two trees, each for half of the value; the inner ranks of one are leaves of the other.

    Law: ``double_tree = AR``, for any ``chunks``. Its latency is logarithmic in n, and the load is balanced between ranks.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        op: "sum", "avg", "min", "max" or "product".
        chunks: the number of pieces that are pipelined through each tree.

    Cost: 2 ⌈log2 n⌉ α + 2 N β with many chunks. A rank sends at most 4 messages of N / (2 chunks) per chunk.

    Source: Sanders, Speck & Träff 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan.

    Raises:
        ValueError: ``op`` is unknown, or not defined for the dtype; ``chunks`` is less than 1.

    >>> from functional_ds import comm
    >>> from functional_ds.comm import algorithms
    >>> comm.simulate(lambda: algorithms.double_tree(torch.arange(4) * comm.world().rank).tolist(), world_size=3)
    [[0, 3, 6, 9], [0, 3, 6, 9], [0, 3, 6, 9]]
    """
    group = resolve_group(group)
    return _all_reduce("double_tree", x, _two_trees(group, chunks), op, group)


def _two_trees(group: Group, chunks: int = 1) -> Total:
    role = role_in([in_order(group.size, group.rank), second(group.size, group.rank)])
    return through(2, role, chunks, group)


# -- powers of two ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _swap(n: int, bit: int) -> Permutation:
    """The exchange between ranks that differ in one bit."""
    return Permutation((rank, rank ^ bit) for rank in range(n))


@lru_cache(maxsize=64)
def _hand_in(n: int, p: int) -> Permutation:
    """Rank p + i sends to rank i."""
    return Permutation((rank, rank - p) for rank in range(p, n))


def _among_power_of_two(group: Group, core: Callable[[Tensor, int, str], Tensor]) -> Total:
    """Runs ``core`` on the first p ranks, a power of two; the others send them their values and receive the result.

    The other ranks make the calls of ``core``, too, without sending or receiving.
    """
    n, rank = group.size, group.rank
    p = 1 << (n.bit_length() - 1)

    def total(flat: Tensor, op: str) -> Tensor:
        if p == n:
            return core(flat, p, op)
        handed = permute(flat, _hand_in(n, p), group)
        result = core(combined(flat, handed, op) if rank < n - p else flat, p, op)
        returned = permute(result, _hand_in(n, p).inverse, group)
        return returned if rank >= p else result

    return total


def _bits(p: int) -> list[int]:
    """1, 2, 4, ... below p."""
    return [1 << level for level in range(p.bit_length() - 1)]


def _ordered(rank: int, bit: int, mine: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's value and its partner's, the lower rank's first."""
    return (theirs, mine) if rank & bit else (mine, theirs)


@composed
def recursive_doubling(x: T, group: Group | None = None, *, op: str = "sum") -> T:
    """All-reduce by recursive doubling: in round k, ranks at distance 2^k exchange whole values.

    Law: ``recursive_doubling = AR``. It has the lowest latency of these algorithms, for small values.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        op: "sum", "avg", "min", "max" or "product".

    Cost: log2 n (α + N β); each rank sends log2 n messages of N. If n is not a power of two: the cost for the next lower power
    p, plus 2 (α + N β) in which the n - p other ranks send their values and receive the result.

    Source: Thakur, Rabenseifner & Gropp 2005, Optimization of collective communication operations in MPICH.

    Raises:
        ValueError: ``op`` is unknown, or not defined for the dtype.

    >>> from functional_ds import comm
    >>> from functional_ds.comm import algorithms
    >>> comm.simulate(lambda: algorithms.recursive_doubling(torch.tensor(comm.world().rank)).item(), world_size=4)
    [6, 6, 6, 6]
    """
    group = resolve_group(group)

    def core(mine: Tensor, p: int, op: str) -> Tensor:
        for bit in _bits(p):
            theirs = permute(mine, _swap(p, bit), group)
            mine = combined(*_ordered(group.rank, bit, mine, theirs), op)
        return mine

    return _all_reduce("recursive_doubling", x, _among_power_of_two(group, core), op, group)


@composed
def halving_doubling(x: T, group: Group | None = None, *, op: str = "sum") -> T:
    """All-reduce by recursive halving (a reduce-scatter) and recursive doubling (an all-gather).

    Law: ``halving_doubling = AR``. Its latency is logarithmic in n, and for powers of two it sends as few bytes as a ring.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        op: "sum", "avg", "min", "max" or "product".

    Cost: 2 log2 n α + 2 (n - 1) / n N β; each rank sends messages of N / 2, N / 4, ..., N / n, and these again. If n is not a
    power of two: the cost for the next lower power, plus 2 (α + N β) as in ``recursive_doubling``.

    Source: Rabenseifner's algorithm, in Thakur, Rabenseifner & Gropp 2005.

    Raises:
        ValueError: ``op`` is unknown, or not defined for the dtype.

    >>> from functional_ds import comm
    >>> from functional_ds.comm import algorithms
    >>> comm.simulate(lambda: algorithms.halving_doubling(torch.arange(2) + comm.world().rank).tolist(), world_size=4)
    [[6, 10], [6, 10], [6, 10], [6, 10]]
    """
    group = resolve_group(group)

    def core(whole: Tensor, p: int, op: str) -> Tensor:
        part = torch.cat(cut(whole, p))  # [N] -> [p * m]
        for bit in reversed(_bits(p)):  # -> [p * m / 2] -> ... -> [m]
            low, high = part.tensor_split(2)
            keep, give = (high, low) if group.rank & bit else (low, high)
            part = combined(*_ordered(group.rank, bit, keep, permute(give, _swap(p, bit), group)), op)
        for bit in _bits(p):  # and back
            part = torch.cat(_ordered(group.rank, bit, part, permute(part, _swap(p, bit), group)))
        return part[: whole.numel()]

    return _all_reduce("halving_doubling", x, _among_power_of_two(group, core), op, group)


# -- two levels ---------------------------------------------------------------------------------------------------------


@composed
def hierarchical(x: T, inner: Group, outer: Group, *, op: str = "sum") -> T:
    """Hierarchical all-reduce: rings within a node (reduce-scatter and all-gather), a double tree across nodes in between.

    Law: ``AG_in ∘ AR_out ∘ RS_in = AR`` over all ranks of the grid. With m ranks per node, the slower links between nodes carry
    only 1/m of the value for each rank.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        inner: the ranks of this rank's node, one axis of a mesh.
        outer: the ranks at this rank's position on all g nodes, the other axis.
        op: "sum", "avg", "min", "max" or "product".

    Cost: 2 (m - 1) α + 2 (m - 1) / m N β inside nodes, 2 ⌈log2 g⌉ α + 2 N / m β across them.

    Source: two-level rings of Jia et al. 2018, Highly scalable deep learning training system, with trees between nodes.

    Raises:
        ValueError: the groups share other ranks than this one; ``op`` is unknown, or not defined for the dtype.

    >>> from functional_ds import comm
    >>> from functional_ds.comm import algorithms
    >>> def program():
    ...     mesh = comm.mesh(node=2, place=2)
    ...     return algorithms.hierarchical(torch.arange(2) * comm.world().rank, mesh["place"], mesh["node"]).tolist()
    >>> comm.simulate(program, world_size=4)
    [[0, 6], [0, 6], [0, 6], [0, 6]]
    """
    if len(set(inner.ranks) & set(outer.ranks)) != 1:
        raise ValueError(
            f"inner={inner!r} and outer={outer!r} are not rows and columns of a grid, which have one rank in common; "
            "take two axes of a mesh"
        )
    across = _two_trees(outer)

    def total(flat: Tensor, op: str) -> Tensor:
        pieces = cut(flat, inner.size)
        place = _reduce_around(pieces, inner, op)
        pieces[place] = across(pieces[place], op)
        _pass_around(pieces, inner)
        return joined(pieces, flat)

    return _all_reduce("hierarchical", x, total, op, inner, outer)
