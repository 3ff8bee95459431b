"""Accelerators: synchronization, pinned memory, memory statistics and random generators.

The functions use torch's module for the device type (``torch.cuda``, ``torch.xpu``, ...). On CPU and meta devices all work is
complete when a call returns.
"""

import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor


def overlaps(device: torch.device) -> bool:
    """Whether the device runs asynchronously to the host, on streams.

    >>> overlaps(torch.device("cpu")), overlaps(torch.device("cuda"))
    (False, True)
    """
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "Stream")


def synchronize(devices: Iterable[torch.device]) -> None:
    """Waits for all work of the devices."""
    for device in set(devices):
        if overlaps(device):
            torch.get_device_module(device).synchronize(device)


def seconds_of(run: Callable[[], Any], devices: Iterable[torch.device]) -> float:
    """The time of a call in seconds, including the work that it queues on devices."""
    devices = set(devices)
    synchronize(devices)
    start = perf_counter()
    run()
    synchronize(devices)
    return perf_counter() - start


def repeated(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> Callable[[], None]:
    """A function that makes the next step each time, for ``seconds_of``."""

    def run() -> None:
        nonlocal state
        state, _ = step(state, batch)

    return run


def in_use() -> torch.device | None:
    """The accelerator that this process uses; None if it has initialized none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    return torch.device(accelerator.type, module.current_device()) if module.is_initialized() else None


def generator_states() -> list[Tensor]:
    """The states of torch's default generators, of the CPU and of the accelerator in use."""
    device = in_use()
    return [torch.get_rng_state(), *([] if device is None else [rng_state(device)])]


def rng_state(device: torch.device) -> Tensor:
    """The state of the device's default generator."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Sets the state of the device's default generator."""
    torch.get_device_module(device).set_rng_state(state, device)


def forked_rng() -> AbstractContextManager[None]:
    """Restores the default generators of the CPU and of the accelerator in use after the block."""
    device = in_use()
    return torch.random.fork_rng([]) if device is None else torch.random.fork_rng([device], device_type=device.type)


@contextmanager
def redrawn(device: torch.device, state: Tensor) -> Iterator[None]:
    """Sets the device's generator to a state inside the block, and restores it afterwards."""
    before = rng_state(device)
    set_rng_state(device, state)
    try:
        yield
    finally:
        set_rng_state(device, before)


def arriving(host: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to the device, asynchronously."""
    return host.pin_memory().to(device, non_blocking=True) if overlaps(device) else host.to(device)


def is_pinned(tensor: Tensor) -> bool:
    """Whether the tensor is in pinned memory; does not initialize a device."""
    return tensor.device.type == "cpu" and in_use() is not None and tensor.is_pinned()


def peak_bytes() -> int | None:
    """The peak of bytes allocated by torch on the accelerator in use; None without one."""
    device = in_use()
    return None if device is None else int(torch.get_device_module(device).max_memory_allocated(device))


def held_bytes() -> tuple[int, int] | None:
    """The bytes allocated, and those reserved, by torch on the accelerator in use; None without one."""
    device = in_use()
    if device is None:
        return None
    module = torch.get_device_module(device)
    return int(module.memory_allocated(device)), int(module.memory_reserved(device))


def resident_peak_bytes() -> int:
    """The peak of this process's resident host memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
