"""What is private of torch.distributed and used here: process groups that their members alone make."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["new_process_group"]


def new_process_group(
    ranks: Sequence[int], name: str, *, timeout: timedelta, device: torch.device | None = None
) -> dist.ProcessGroup:
    """A process group of the default group's backends that its members alone make, under a name of their own.

    ``torch.distributed.new_group`` names a group by the number of groups that the process has, so members that have made
    unequal numbers wait for each other under different names. Where the default group is bound to a device, it splits the
    default group's communicator, for which all ranks of the world must come; here the new group connects by itself.

    Args:
        ranks: the members, as ranks of the world, in the group's order.
        name: the same on all members; no group of the process may have it.
        timeout: for the group's collectives.
        device: where NCCL connects the members at once; None for the backends without such a device.
    """
    everyone: Any = dist.group.WORLD
    backend, store = c10d._world.pg_map[everyone]
    bound, everyone.bound_device_id = everyone.bound_device_id, None
    try:
        pg: dist.ProcessGroup
        pg, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            backend,
            store,
            name,  # type: ignore[arg-type]
            timeout=timeout,
            device_id=device,
            group_desc=name,
        )
    finally:
        everyone.bound_device_id = bound
    c10d._world.pg_group_ranks[pg] = {rank: place for place, rank in enumerate(ranks)}
    return pg
