"""Collectives of Python objects, which are pickled."""

import pickle
from typing import Any, TypeVar

import torch
from torch import Tensor

from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.rows import ALL_GATHER

from .api import broadcast
from .calls.dispatch import request, resolve_group
from .calls.uneven import need_values, sizes_along

T = TypeVar("T")


def _pack(value: Any, group: Group) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(group.world.device)


def _unpack(data: Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())


def all_gather_object(value: T, group: Group | None = None) -> list[T]:
    """Gathers a Python object from every rank; returns copies in rank order.

    Objects are pickled, and unpickling can run arbitrary code, so the ranks must trust each other.

    Cost: each rank sends its pickle n - 1 times, and 16 (n - 1) bytes for its size.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: the value cannot be pickled.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.all_gather_object({"rank": comm.world().rank}), world_size=2)[0]
    [{'rank': 0}, {'rank': 1}]
    """
    group = resolve_group(group)
    need_values("all_gather_object", group, "the other ranks' objects")
    mine = _pack(value, group)
    (sizes,) = sizes_along(0, [mine], group)
    everything = request(Call(ALL_GATHER, {"dim": 0, "tiled": True, "sizes": sizes}), mine, group).run()
    return [_unpack(data) for data in everything.split(sizes)]


def broadcast_object(value: T | None, src: int = 0, group: Group | None = None) -> T:
    """Sends a Python object from rank ``src`` to every rank; returns a copy.

    The ranks must trust each other: see ``all_gather_object``.

    Args:
        value: the object on rank ``src``; ignored on the other ranks.
        src: the sender, a rank of the group.
        group: the ranks that take part; None for the whole world.

    Cost: ``src`` sends its pickle, and 8 bytes, n - 1 times.

    Raises:
        ValueError: ``src`` is not a rank of the group.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.broadcast_object(["from", comm.world().rank], src=1), world_size=2)
    [['from', 1], ['from', 1]]
    """
    group = resolve_group(group)
    need_values("broadcast_object", group, "another rank's object")
    mine = _pack(value if group.rank == src else None, group)
    size = int(broadcast(torch.tensor(mine.numel(), device=mine.device), src, group))
    template = mine if group.rank == src else mine.new_empty(size)
    sent: T = _unpack(broadcast(template, src, group))
    return sent
