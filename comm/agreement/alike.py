"""Compares arguments that must be equal on all ranks of a group, together with the collectives called for them."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from functional_ds.base.torch_private import disable_dispatch_modes, has_values
from functional_ds.base.tree import summary
from functional_ds.comm.record.group import Group
from functional_ds.comm.variance.declarations import raw_bytes

from .description import described


@contextmanager
def alike(what: str, group: Group, **arguments: Any) -> Iterator[None]:
    """Checks, inside the block, that all ranks of a group have called ``what`` with equal arguments.

    Where ranks compare their calls (in simulations and under ``comm.debug.checked``), the calls inside the block compare these
    arguments too. Elsewhere nothing is compared. Nothing is sent.

    Args:
        what: the function that got the arguments.
        group: the group whose calls inside the block are compared.
        arguments: must be equal on all ranks; tensors are compared by their bits.

    Raises:
        MismatchError: from a call inside the block, if ranks have different arguments; names them and the source lines.

    >>> import torch
    >>> from functional_ds import comm
    >>> def scaled_sum(x, factor):
    ...     with alike("scaled_sum", comm.world(), factor=factor):
    ...         return factor * comm.all_reduce(x)
    >>> comm.simulate(lambda: scaled_sum(torch.ones(1), comm.world().rank), world_size=2)
    Traceback (most recent call last):
        ...
    functional_ds.comm.table.errors.MismatchError: ... called all_reduce(op='sum') of [float32[1]], for scaled_sum(factor=...
    """
    world, key = group.world, (group.ranks, group.name)
    if not world.compares or group.size == 1:
        yield
        return
    before = world.made_for.get(key, "")
    world.made_for[key] = f"{what}({', '.join(f'{name}={_text(value)}' for name, value in arguments.items())})"
    try:
        yield
    finally:
        world.made_for[key] = before


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return described(value)
    shown = summary(value)
    if not has_values(value):
        return shown
    with torch.no_grad(), disable_dispatch_modes():
        return f"{shown} with CRC-32 {zlib.crc32(raw_bytes(value).numpy().data):08x}"
