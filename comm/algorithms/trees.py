"""Reductions up binary trees of ranks and broadcasts down them, for one tree or two."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.comm.backends.reduction import combine
from functional_ds.comm.calls.dispatch import start
from functional_ds.comm.p2p import Recv, Send, batch_p2p
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Pending
from functional_ds.comm.table.packing import pad_rows


def cut(flat: Tensor, n: int) -> list[Tensor]:
    """Splits [N] into n pieces [m], zero-padded."""
    return list(pad_rows(flat, n).unbind(0))


def joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """The inverse of ``cut``."""
    if like.is_meta:  # there torch.cat takes milliseconds for a thousand pieces
        return torch.empty_like(like)
    return torch.cat(list(pieces))[: like.numel()]


def combined(a: Tensor, b: Tensor, op: str) -> Tensor:
    """``combine``, except on meta; all ranks must pass the same value first, as max of 0.0 and -0.0 depends on the order."""
    return a if a.is_meta else combine(a, b, op)


Edge = tuple[int, int]  # a tree, and this rank's neighbour in it


@attrs.frozen
class TreeRole:
    """A rank's part in several trees.

    Attributes:
        leaf: its parents in trees in which it has no children.
        inner: its parents in the other trees.
        children: its children.
        apex: its children in a tree of which it is the root, if it is inner in another; they are handled last.
    """

    leaf: list[Edge]
    inner: list[Edge]
    children: list[Edge]
    apex: list[Edge]


def in_order(n: int, rank: int) -> tuple[int | None, list[int]]:
    """A rank's parent and children in the tree in rank order: rank 0 above a binary tree whose leaves are the odd ranks.

    A rank's lowest bit is its distance from its parent, and half of that the distance from its children, unless a right child
    would be beyond n; then it is a nearer rank.
    """
    bit = rank & -rank
    up = (rank ^ bit) | (bit << 1)
    half = (bit or 1 << (n - 1).bit_length()) >> 1
    children = [rank - half] if rank and half else []
    while half and rank + half >= n:
        half >>= 1
    return (None if rank == 0 else up if up < n else rank ^ bit), ([*children, rank + half] if half else children)


def second(n: int, rank: int) -> tuple[int | None, list[int]]:
    """The same tree with ranks numbered backwards, or shifted by one for odd n: its leaves are inner ranks of the first."""
    place, back = ((rank - 1) % n, lambda r: (r + 1) % n) if n % 2 else (n - 1 - rank, lambda r: n - 1 - r)
    parent, children = in_order(n, place)
    return (None if parent is None else back(parent)), [back(child) for child in children]


def role_in(places: Sequence[tuple[int | None, list[int]]]) -> TreeRole:
    """The role of a rank with these (parent, children), one pair for each tree."""
    ups = [(t, parent, bool(children)) for t, (parent, children) in enumerate(places) if parent is not None]
    downs = [(t, child, parent is None) for t, (parent, children) in enumerate(places) for child in children]
    inner = [(t, parent) for t, parent, has_children in ups if has_children]
    return TreeRole(
        leaf=[(t, parent) for t, parent, has_children in ups if not has_children],
        inner=inner,
        children=[(t, child) for t, child, is_root in downs if not (is_root and inner)],
        apex=[(t, child) for t, child, is_root in downs if is_root and inner],
    )


def _sends(parts: Sequence[Tensor], edges: Sequence[Edge]) -> list[Send]:
    return [Send(parts[t], peer, tag=t) for t, peer in edges]


def _recvs(parts: Sequence[Tensor], edges: Sequence[Edge]) -> list[Recv]:
    return [Recv(parts[t], peer, tag=t) for t, peer in edges]


def _rise(parts: list[Tensor], role: TreeRole, group: Group, op: str) -> Pending[Any]:
    """Reduces part t up tree t: leaves send their part, inner ranks reduce it with their children's and send the result."""

    def collect(edges: Sequence[Edge], sends: Sequence[Send]) -> None:
        received = batch_p2p([*_recvs(parts, edges), *sends], group)
        for (t, _), value in zip(edges, received, strict=False):  # the results of sends come after
            parts[t] = combined(parts[t], value, op)

    collect(role.children, _sends(parts, role.leaf))
    onwards: Pending[Any] = start(batch_p2p, _sends(parts, role.inner), group)
    collect(role.apex, [])
    return onwards


def _sink(parts: list[Tensor], role: TreeRole, group: Group) -> Pending[Any]:
    """Broadcasts part t down tree t: inner ranks forward what they receive."""

    def keep(edges: Sequence[Edge], received: Sequence[Tensor]) -> None:
        for (t, _), value in zip(edges, received, strict=False):
            parts[t] = value

    first = start(batch_p2p, _sends(parts, role.apex), group)
    keep(role.inner, batch_p2p(_recvs(parts, role.inner), group))
    rest = start(batch_p2p, [*_recvs(parts, role.leaf), *_sends(parts, role.children)], group)
    return Pending.all([first, rest.then(partial(keep, role.leaf))])


def through(trees: int, role: TreeRole, chunks: int, group: Group) -> Callable[[Tensor, str], Tensor]:
    """An all-reduce of a flat payload through the trees, chunk by chunk."""
    if chunks < 1:
        raise ValueError(f"chunks={chunks}: a value is split into at least one chunk")

    def total(flat: Tensor, op: str) -> Tensor:
        group.world.connect([*role.leaf, *role.inner, *role.children, *role.apex], group, flat.device)
        pieces = cut(flat, chunks * trees)
        rows = [pieces[i : i + trees] for i in range(0, len(pieces), trees)]
        pending = [_rise(parts, role, group, op) for parts in rows]
        pending += [_sink(parts, role, group) for parts in rows]
        Pending.all(pending).wait()
        return joined([part for parts in rows for part in parts], flat)

    return total
