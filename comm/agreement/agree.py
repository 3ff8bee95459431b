"""Checks that values are the same on all ranks."""

import hashlib
import itertools
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.comm.api import all_gather, all_reduce
from functional_ds.comm.objects import all_gather_object
from functional_ds.comm.record.group import Group

_LONGEST = 400  # characters of what a rank has, in a message


def agree(value: Any, *groups: Group, what: str, differ: str, mend: str) -> list[int]:
    """Checks that ``value`` is the same on all ranks, or raises on all of them; returns these ranks, as ranks of the world.

    The CRC-32 of ``repr(value)`` is compared, so equal values must have equal reprs on all ranks.

    Args:
        value: the value that must be the same.
        groups: the ranks that compare. Several groups, such as two axes of a mesh, compare over the grid that they span.
        what: the argument that the value comes from, for the message.
        differ: how it differs, as in "other shapes".
        mend: how to fix it.

    Cost: for groups of n and m ranks, each rank sends 16 (n - 1) + 16 n (m - 1) bytes, on their channels "control".

    Raises:
        ValueError: some ranks have another value than the first rank; names them.

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
    odd = [rank for crc, rank in zip(prints, ranks, strict=True) if crc != prints[0]]
    if odd:
        raise ValueError(f"{what}: ranks {odd} of group {first.name!r} have {differ} than rank {ranks[0]}; {mend}")
    return list(ranks)


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


@attrs.frozen
class Entry:
    """A value that must be the same on all ranks.

    Attributes:
        shown: its text in messages.
        exact: further text to compare, for values that may differ although ``shown`` is equal.
    """

    shown: str = attrs.field(converter=_without_addresses)
    exact: str = attrs.field(default="", converter=_without_addresses)

    def __str__(self) -> str:
        return self.shown


def differences(entries: Mapping[str, Entry], groups: Sequence[Group], *, what: str) -> str:
    """Lists the entries that differ between ranks and the ranks' values, as one text on all ranks; empty if none differ.

    Args:
        entries: by name, in one order.
        groups: the ranks that compare; several groups, such as the axes of a mesh, compare over the grid that they span.
        what: a short description of the entries, for simulations on shapes only, which compare it later.

    Cost: an all-reduce of 16 bytes per group, on its channel "control"; if entries differ, also an all-gather of them.

    >>> from functional_ds import comm
    >>> def program():
    ...     return differences({"rate": Entry(f"{0.1 * (comm.world().rank != 1)}")}, [comm.world()], what="rates")
    >>> comm.simulate(program, world_size=3)[0]
    'rate: ranks 0, 2 have 0.1; rank 1 has 0.0'
    """
    channels = [group.channel("control") for group in groups]
    number = int.from_bytes(hashlib.sha256(repr(entries).encode()).digest()[:7], "big")
    least: Tensor = torch.tensor([number, -number], device=channels[0].world.device)
    for channel in channels:
        channel.world.agreed(f"{what} ({number:x})", channel)
        least = all_reduce(least, channel, op="min")  # axis by axis, so over the whole grid
    low, high = least.tolist()
    if low == -high:
        return ""
    told = {groups[0].ranks[groups[0].rank]: entries}
    for channel in channels:
        for others in all_gather_object(told, channel):
            told |= others
    return _as_text(told)


def _as_text(told: Mapping[int, Mapping[str, Entry]]) -> str:
    lines = []
    for name in dict.fromkeys(name for entry in told.values() for name in entry):
        having: dict[Entry | None, list[int]] = {}
        for rank in sorted(told):
            having.setdefault(told[rank].get(name), []).append(rank)
        if len(having) > 1:
            alike = len({entry and entry.shown for entry in having}) == 1
            texts = _shortened(["none" if entry is None else entry.exact if alike else entry.shown for entry in having])
            lines.append(f"{name}: {'; '.join(map(_having, having.values(), texts))}")
    return ". ".join(lines)


def _having(ranks: Sequence[int], text: str) -> str:
    return f"rank {ranks[0]} has {text}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have {text}"


def _shortened(texts: Sequence[str]) -> list[str]:
    """Shortens long texts to start shortly before their first difference."""
    if max(map(len, texts)) <= _LONGEST:
        return [*texts]
    common = sum(1 for _ in itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False)))
    start = max(0, common - _LONGEST // 4)
    return [f"{'...' * bool(start)}{text[start : start + _LONGEST]}{'...' * (len(text) > start + _LONGEST)}" for text in texts]
