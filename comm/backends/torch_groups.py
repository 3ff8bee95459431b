"""Creates process groups of torch by their members only, with private functions of torch.distributed."""

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
    """Creates a process group with the default group's back ends, for which only its members make the call.

    ``torch.distributed.new_group`` names a group by the number of groups in the process, so members with different numbers of
    groups wait under different names; and if the default group is bound to a device, it splits that group's communicator, for
    which all ranks of the world must call it. Here the new group connects by itself.

    Args:
        ranks: the members, as ranks of the world, in the group's order.
        name: the same on all members, and not the name of another group of the process.
        timeout: for the group's collectives.
        device: the device for which NCCL connects the members at once; None for back ends without one.
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
