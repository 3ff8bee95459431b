"""``deepspeed.runtime.utils``: reports of memory, seeds, norms and clipping of tensors."""

import gc
import math
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.deepspeed.accelerator.accelerator import DeepSpeedAccelerator
from functional_ds.deepspeed.accelerator.accelerators import get_accelerator

__all__ = [
    "clip_grad_norm_",
    "get_global_norm_of_tensors",
    "get_ma_status",
    "memory_status",
    "move_to_device",
    "partition_balanced",
    "partition_uniform",
    "see_memory_usage",
    "set_random_seed",
]

_GB = 1024**3


def _memory(device: DeepSpeedAccelerator) -> tuple[int, int, int, int]:
    """Bytes in use and their peak, bytes kept and their peak."""
    kept, most = device.memory_reserved(), device.max_memory_reserved()
    return device.memory_allocated(), device.max_memory_allocated(), kept, most


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints the device's memory in use, its peak since the last call, and the host's; on rank 0, and only with ``force``."""
    if not force or comm.world().rank:
        return
    gc.collect()
    device = get_accelerator()
    used = device.total_memory() - device.available_memory()
    held, peak, kept, most = (size / _GB for size in _memory(device))
    sys.stdout.write(f"{message}\nMA {held:.2f} GB  Max_MA {peak:.2f} GB  CA {kept:.2f} GB  Max_CA {most:.2f} GB\n")
    sys.stdout.write(f"{device.device_name()} memory: used = {used / _GB:.2f} GB of {device.total_memory() / _GB:.2f} GB\n")
    device.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Prints the device's memory in use and its peak.

    Args:
        msg: is printed first.
        print_rank: the rank that prints; -1 for all.
        reset_max: reset the peak before.
    """
    rank, device = comm.world().rank, get_accelerator()
    if print_rank not in (-1, rank):
        return
    device.synchronize()
    if reset_max:
        device.reset_peak_memory_stats()
    held, peak, kept, most = (f"{size / _GB:0.4f}GB" for size in _memory(device))
    sys.stdout.write(
        f"RANK={rank} MEMSTATS {msg} device={device.current_device_name()} "
        f"current alloc={held} (max={peak}) current cache={kept} (max={most})\n"
    )


def get_ma_status() -> int:
    """The device's bytes in use; 0 on ranks other than 0."""
    return 0 if comm.world().rank else int(get_accelerator().memory_allocated())


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Tensors in lists, tuples and dicts on a device; one for which ``criterion_func`` holds stays the same object there."""
    if isinstance(item, Tensor) and criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, list | tuple):
        return type(item)([move_to_device(part, device, criterion_func) for part in item])
    if isinstance(item, dict):
        return {name: move_to_device(part, device, criterion_func) for name, part in item.items()}
    return item.to(device)


def set_random_seed(seed: int) -> None:
    """Seeds Python, NumPy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # as DeepSpeed fits a seed to each
    torch.manual_seed(seed % 2**63)


def get_global_norm_of_tensors(
    input_tensors: Iterable[Tensor], norm_type: float | str = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """The norm of this rank's tensors as one vector, in fp32; -1 if it is not finite, as in DeepSpeed.

    Raises:
        ValueError: ``mpu`` or ``moe_ep_group`` is given: a step's phase ``norm`` sums over ranks.
    """
    if mpu is not None or moe_ep_group is not None:
        raise ValueError("mpu= and moe_ep_group=: norms over ranks are the step's; T.clip clips by them")
    total = _norm(input_tensors, norm_type)
    return torch.where(total.isfinite(), total, torch.full_like(total, -1.0))


def _norm(tensors: Iterable[Tensor], norm_type: float | str) -> Tensor:
    return nn.utils.get_total_norm([tensor.detach().float() for tensor in tensors], float(norm_type))


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float | str = 2, mpu: Any = None
) -> Tensor:
    """Clips the gradients to the norm ``max_norm``; returns the norm, averaged over all ranks.

    All ranks call it, as in DeepSpeed. A norm that is not finite is returned as it is, and the gradients become 0 or NaN.

    Args:
        parameters: those with a ``grad``.
        max_norm: the limit.
        norm_type: the p of the p-norm; may be "inf".
        mpu: unsupported; norms over ranks are the step's.

    Raises:
        ValueError: ``mpu`` is given.
    """
    if mpu is not None:
        raise ValueError("mpu=: norms over ranks are the step's; T.clip clips by them")
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [parameter.grad for parameter in held if parameter.grad is not None]
    total = comm.all_reduce(_norm(grads, norm_type) / comm.world().size)
    nn.utils.clip_grads_with_norm_(held, max_norm, total)
    return total


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """DeepSpeed's split of a sequence of items: boundaries, the first parts one longer; parts beyond the items are empty.

    >>> partition_uniform(10, 4), partition_uniform(2, 3)
    ([0, 3, 6, 8, 10], [0, 1, 2, 2])
    """
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    per_part, more = divmod(num_items, num_parts)
    return [part * per_part + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Iterable[float], num_parts: int) -> list[int]:
    """DeepSpeed's split of a sequence of weights: boundaries with the least difference of the heaviest and lightest part.

    Of several such splits it takes the one with the latest last boundaries. Cost: O(parts · n²).

    >>> partition_balanced([1, 1, 1, 1, 4], 2), partition_balanced([0, 1, 1, 0], 2)
    ([0, 4, 5], [0, 2, 4])
    """
    held = [float(weight) for weight in weights]
    count = len(held)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    total = [0.0]
    for weight in held:
        total.append(total[-1] + weight)
    # By end and number of parts: (heaviest, lightest) of the best cut so far, and where its last part begins.
    best = {(0, 0): (0.0, math.inf, 0)}
    for end in range(1, count + 1):
        for parts in range(1, min(end, num_parts) + 1):
            least = math.inf
            for begin in range(end):
                high, low, _ = best.get((begin, parts - 1), (math.inf, math.inf, 0))
                if high == math.inf:
                    continue
                high, low = max(high, total[end] - total[begin]), min(low, total[end] - total[begin])
                if high - low <= least:
                    least = high - low
                    best[end, parts] = high, low, begin
    cuts = [count]
    for parts in range(num_parts, 0, -1):
        cuts.append(best[cuts[-1], parts][2])
    return cuts[::-1]
