"""Joining the world, this process's rank, and groups, by DeepSpeed's names and arguments."""

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from functional_ds import comm

from .comms_log import configure

__all__ = [
    "destroy_process_group",
    "get_all_ranks_from_group",
    "get_backend",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "is_available",
    "is_initialized",
    "new_group",
]

_MPI = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK"}  # by this library's: the rest of OMPI_COMM_WORLD_...


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins the world that torchrun, a launcher or MPI describes; without any, the process is a world of one rank.

    It also sets torch's default process group, so ``torch.distributed.get_rank()`` works afterwards. A second call does
    nothing.

    Args:
        dist_backend: "nccl", "gloo", or both as "cpu:gloo,cuda:nccl"; None chooses. Without a GPU "nccl" means Gloo (logged).
        auto_mpi_discovery: whether to read OMPI_COMM_WORLD_RANK and similar variables if RANK and WORLD_SIZE are not set.
        distributed_port: MASTER_PORT, with MPI's variables and no port in the environment.
        verbose: has no effect; use log levels.
        timeout: for joining and for each message; None is this library's default, or DEEPSPEED_TIMEOUT in minutes.
        init_method: ``"tcp://host:port"``, ``"file:///path"`` or ``"env://"``.
        dist_init_required: False raises an error in a process that is in no world yet.
        config: a config whose ``comms_logger`` enables the log of collectives.
        rank: this process's rank, if ``init_method`` needs it; -1 reads RANK.
        world_size: the number of processes; -1 reads WORLD_SIZE.

    Raises:
        ValueError: the process is in no world and ``dist_init_required`` is False; otherwise as ``comm.init_distributed``.
        TimedOutError: some processes have not joined.
    """
    if config is not None:
        configure(config)
    if comm.is_initialized():
        return
    if dist_init_required is False:
        raise ValueError(
            "dist_init_required=False, and this process is in no world yet: call init_distributed() before, or leave it out"
        )
    if auto_mpi_discovery and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        _read_mpi(distributed_port)
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if timeout is None and minutes:
        timeout = timedelta(minutes=float(minutes))
    alone = rank < 0 and world_size < 0 and not os.environ.keys() & {"RANK", "WORLD_SIZE"}
    if dist_backend == "nccl" and not torch.cuda.is_available():
        logging.getLogger("DeepSpeed").warning(
            "init_distributed: NCCL needs GPUs, and there are none; Gloo carries the messages"
        )
        dist_backend = "gloo"
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    comm.init_distributed(
        dist_backend,
        world_size=1 if alone else None if world_size < 0 else world_size,
        rank=0 if alone else None if rank < 0 else rank,
        init_method=init_method,
        **limit,
    )


def _read_mpi(port: int) -> None:
    """Sets torchrun's variables from Open MPI's."""
    variables = {name: os.environ.get(f"OMPI_COMM_WORLD_{theirs}") for name, theirs in _MPI.items()}
    if variables["RANK"] is None or variables["WORLD_SIZE"] is None:
        return
    for name, value in variables.items():
        if value is not None:
            os.environ.setdefault(name, value)
    if "MASTER_ADDR" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(port))


is_initialized, get_local_rank, get_world_group = comm.is_initialized, comm.get_local_rank, comm.world


def is_available() -> bool:
    """Always True."""
    return True


def group_of(group: Any) -> comm.Group:
    """This library's group: None for the world; a torch process group by its ranks.

    Raises:
        TypeError: it is not a group.
    """
    if group is None or group is dist.GroupMember.WORLD:
        return comm.world()
    if isinstance(group, comm.Group):
        return group
    if isinstance(group, dist.ProcessGroup):
        return comm.new_group(dist.get_process_group_ranks(group))
    raise TypeError(f"group={group!r} is not a group: pass None for the world, or what new_group returned")


def place_in(group: comm.Group, rank: int, name: str) -> int:
    """The rank in the group of a rank of the world; torch.distributed counts ``src`` and ``dst`` in the world."""
    if rank not in group.ranks:
        raise ValueError(f"{name}={rank} is not one of the group's ranks {list(group.ranks)}; ranks count in the world")
    return group.ranks.index(rank)


def get_rank(group: Any = None) -> int:
    """This rank's rank in the group, by default in the world; -1 if it is not a member."""
    return group_of(group).rank


def get_world_size(group: Any = None) -> int:
    """The number of ranks in the group, by default in the world; -1 if this rank is not a member."""
    ranks = group_of(group)
    return ranks.size if ranks.rank >= 0 else -1


def new_group(ranks: Sequence[int]) -> comm.Group:
    """A group of some of the world's ranks; every rank may call it."""
    return comm.new_group(list(ranks))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The rank in the world of a rank in the group.

    Raises:
        ValueError: the group has no such rank.
    """
    known = group_of(group)
    if not 0 <= group_rank < known.size:
        raise ValueError(f"group_rank={group_rank} is not a place in a group of {known.size} ranks")
    return known.ranks[group_rank]


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The group's ranks in the world."""
    return list(group_of(group).ranks)


def get_backend(group: Any = None) -> str:
    """The group's backend: "gloo", "nccl" or both; "gloo" in a simulation and for one rank alone."""
    return str(dist.get_backend()) if dist.is_initialized() else "gloo"


def destroy_process_group(group: Any = None) -> None:
    """Leaves the world; does nothing for other groups."""
    if group is None or group_of(group).ranks == comm.world().ranks:
        comm.destroy_process_group()
