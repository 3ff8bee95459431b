"""Collectives that exchange values without reducing them: all_to_all and permute."""

from collections.abc import Iterable, Sequence
from operator import index
from typing import TypeAlias, TypeVar

import torch

from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Request
from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.exchanges import ALL_TO_ALL, ALL_TO_ALL_ROWS, PERMUTE
from functional_ds.comm.table.permutation import Permutation

from .calls.dispatch import collective, request, resolve_dim, resolve_group
from .calls.uneven import need_values

T = TypeVar("T")
_Sizes: TypeAlias = Sequence[int] | None


@collective
def all_to_all(
    x: T,
    group: Group | None = None,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    input_splits: _Sizes = None,
    output_splits: _Sizes = None,
) -> Request[T]:
    """Splits each rank's value along ``split_dim``, sends piece p to rank p, and concatenates along ``concat_dim``.

    Law: ``A2A(c, s) ∘ A2A(s, c) = id``; the transpose swaps the dims. With splits, the transpose swaps the splits.

    Args:
        x: a pytree of tensors.
        group: the ranks that take part; None for the whole world.
        split_dim: the dim to split, into equal pieces or by ``input_splits``.
        concat_dim: the dim to concatenate along; with ``input_splits`` it must equal ``split_dim``.
        input_splits: rows to send to each rank, as in expert parallelism.
        output_splits: rows to receive from each rank. If omitted, they are exchanged first, which blocks the host.

    Cost: each rank sends (n - 1) / n of its value; with splits, all rows for other ranks, and 8 (n - 1) bytes to exchange
    omitted ``output_splits``.

    Raises:
        ValueError: a size is not a multiple of n, splits do not add up to it, or a dim is out of range.
        MismatchError: the splits of two ranks contradict each other (checked in simulations and under ``debug.checked``).

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
            raise ValueError(f"output_splits={list(output_splits)} without input_splits: pass both")
        return request(Call(ALL_TO_ALL, {"split_dim": split_dim, "concat_dim": concat_dim}), x, group)
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
    return request(Call(ALL_TO_ALL_ROWS, options), x, group)


def _sizes(name: str, splits: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(index(rows) for rows in splits)
    except TypeError:
        raise TypeError(f"{name}={splits!r}: one whole number of rows for each rank") from None


@collective
def permute(x: T, perm: Permutation | Iterable[tuple[int, int]], group: Group | None = None) -> Request[T]:
    """Sends values between ranks by a permutation, as ``jax.lax.ppermute``; a rank without a source gets zeros.

    Law: ``PM(p) ∘ PM(q) = PM(p ∘ q)``; the transpose is ``PM(p⁻¹)``.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        perm: (source, destination) pairs of ranks of the group, the same on all ranks. For a loop, make a ``Permutation`` once.
        group: the ranks that take part; None for the whole world.

    Cost: a rank with a destination other than itself sends its value once.

    Raises:
        ValueError: a rank is out of range, or occurs twice as a source or twice as a destination.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.permute(torch.tensor(comm.world().rank), [(0, 1), (1, 2)]).item(), world_size=3)
    [0, 0, 1]
    """
    perm = perm if isinstance(perm, Permutation) else Permutation(perm)
    return request(Call(PERMUTE, {"perm": perm}), x, group)
