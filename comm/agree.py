"""A check that a value is the same on all ranks."""

import zlib
from typing import Any

import torch
from torch import Tensor

from functional_ds.comm.record.group import Group

from .api import all_gather

__all__ = ["agree"]


def agree(value: Any, *groups: Group, what: str, differ: str, mend: str) -> list[int]:
    """Raises on all ranks unless ``value`` is the same on all of them; returns those ranks, as ranks of the world.

    The ranks compare the CRC-32 of ``repr(value)``, so equal values must read the same on every rank.

    Args:
        value: what must be the same.
        groups: the ranks that compare. Two groups, such as two axes of a mesh, compare over the grid that they span.
        what: the argument that the value comes from; begins the message.
        differ: how it differs on some ranks, as in "other shapes".
        mend: what to do about it.

    Cost: 16 (n - 1) bytes a group, on its channel "control".

    Raises:
        ValueError: on some ranks the value differs from the first one's; names those ranks.

    >>> from functional_ds import comm
    >>> def program(sizes):
    ...     return comm.agree(sizes[comm.world().rank], comm.world(), what="size", differ="another size", mend="pass one size")
    >>> comm.simulate(program, [8, 8, 8], world_size=3)[0]
    [0, 1, 2]
    >>> comm.simulate(program, [8, 8, 7], world_size=3)
    Traceback (most recent call last):
        ...
    ValueError: size: ranks [2] of group 'world' have another size than rank 0; ...
    """
    first, channels = groups[0], [group.channel("control") for group in groups]
    mine = [zlib.crc32(repr(value).encode()), first.ranks[first.rank]]
    table: Tensor = torch.tensor([mine], device=channels[0].world.device)  # [1, 2]
    for channel in channels:
        channel.world.agreed(f"agree(what={what!r}) of a value with CRC-32 {mine[0]:08x}", channel)
        table = all_gather(table, channel)  # [rows, 2] -> [n * rows, 2]
    prints, ranks = table.T.tolist()
    odd = [rank for found, rank in zip(prints, ranks, strict=True) if found != prints[0]]
    if odd:
        raise ValueError(f"{what}: ranks {odd} of group {first.name!r} have {differ} than rank {ranks[0]}; {mend}")
    return list(ranks)
