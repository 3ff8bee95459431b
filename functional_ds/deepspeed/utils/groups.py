"""``deepspeed.utils.groups``: which ranks share what. The data-parallel group is the world; no state is kept between calls."""

import re
from typing import Any

from functional_ds import comm

__all__ = [
    "expert_data_ranks",
    "expert_ranks",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
]


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Does nothing: layers define over how many ranks their experts are split.

    Raises:
        ValueError: ``mpu`` is given; tensor parallelism is ``T.tensor_parallel``'s.
    """
    if mpu is not None:
        raise ValueError("mpu=: model parallelism of other libraries is unsupported; see docs/tensor-parallel.md")


get_data_parallel_group = comm.world


def get_data_parallel_world_size() -> int:
    """The number of ranks."""
    return comm.world().size


def get_data_parallel_rank() -> int:
    """This rank."""
    return comm.world().rank


def get_model_parallel_group() -> comm.Group:
    """A group of only this rank."""
    return comm.new_group([comm.world().rank])


def get_model_parallel_world_size() -> int:
    """1."""
    return 1


def get_model_parallel_rank() -> int:
    """0."""
    return 0


get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_sequence_parallel_world_size = _get_expert_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_rank = get_model_parallel_rank


def _get_sequence_parallel_group() -> None:
    """None: sequence parallelism is ``T.sequence``'s."""
    return None


def _get_data_parallel_group_ranks() -> list[int]:
    return list(comm.world().ranks)


def _get_broadcast_src_rank() -> int:
    return 0


def expert_ranks(ep_size: int, rank: int, world_size: int) -> list[int]:
    """The neighbouring ranks that hold a rank's experts together.

    Raises:
        ValueError: ``ep_size`` does not divide the world.

    >>> expert_ranks(2, 3, 4), expert_data_ranks(2, 3, 4)
    ([2, 3], [1, 3])
    """
    if world_size % ep_size:
        raise ValueError(f"ep_size={ep_size} does not divide the world of {world_size}")
    first = rank - rank % ep_size
    return list(range(first, first + ep_size))


def expert_data_ranks(ep_size: int, rank: int, world_size: int) -> list[int]:
    """The ranks that hold the same experts as a rank."""
    expert_ranks(ep_size, rank, world_size)
    return list(range(rank % ep_size, world_size, ep_size))


def _ep_size(group_name: str) -> int:
    match = re.fullmatch(r"ep_size_(\d+)", group_name)
    if match is None:
        raise ValueError(f"group_name={group_name!r}: expert groups are called 'ep_size_N'")
    return int(match[1])


def _get_expert_parallel_group(group_name: str) -> comm.Group:
    here = comm.world()
    return comm.new_group(expert_ranks(_ep_size(group_name), here.rank, here.size), group_name)


def _get_expert_data_parallel_group(group_name: str) -> comm.Group:
    here = comm.world()
    return comm.new_group(expert_data_ranks(_ep_size(group_name), here.rank, here.size), f"{group_name}/data")


def _get_expert_parallel_world_size(group_name: str) -> int:
    return _get_expert_parallel_group(group_name).size


def _get_expert_parallel_rank(group_name: str) -> int:
    return _get_expert_parallel_group(group_name).rank


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return _get_expert_data_parallel_group(group_name).size


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _get_expert_data_parallel_group(group_name).rank
