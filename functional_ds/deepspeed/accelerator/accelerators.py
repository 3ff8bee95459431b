"""``get_accelerator``: CUDA devices, and the CPU, on which functions without meaning do nothing."""

import functools
import os
import re
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_ds.base.device import resident_peak_bytes

from .accelerator import DeepSpeedAccelerator


class CUDAAccelerator(DeepSpeedAccelerator):
    """NVIDIA's and AMD's GPUs."""

    _name, _communication_backend_name = "cuda", "nccl"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device("cuda", torch.cuda.current_device() if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True

    def is_fp16_supported(self) -> bool:
        return torch.cuda.get_device_capability()[0] >= 7 if torch.cuda.is_available() else True

    def is_triton_supported(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        torch.cuda.nvtx.range_pop()

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class CPUAccelerator(DeepSpeedAccelerator):
    """The CPU. Its memory is that of the process, as Linux counts it; elsewhere its peak is never reset."""

    _name, _communication_backend_name = "cpu", "gloo"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device("cpu")

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def device_count(self) -> int:
        """LOCAL_SIZE or LOCAL_WORLD_SIZE, the ranks of this host; 1 without them."""
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def default_stream(self, device_index: int | None = None) -> Any:
        return self.module.current_stream()

    def empty_cache(self) -> None:
        return None

    def memory_allocated(self, device_index: int | None = None) -> int:
        return _linux("self/status", "VmRSS") or resident_peak_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return _linux("self/status", "VmHWM") or resident_peak_bytes()

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        with suppress(OSError):  # not Linux, or not allowed
            Path("/proc/self/clear_refs").write_text("5")

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {"allocated_bytes.all.current": self.memory_allocated(), "allocated_bytes.all.peak": self.max_memory_allocated()}

    def total_memory(self, device_index: int | None = None) -> int:
        return _linux("meminfo", "MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        return _linux("meminfo", "MemAvailable") or self.total_memory() - self.memory_allocated()


def _linux(file: str, entry: str) -> int | None:
    """Bytes of an entry of a file of /proc; None if there is none."""
    try:
        text = Path("/proc", file).read_text()
    except OSError:
        return None
    match = re.search(rf"^{entry}:\s+(\d+) kB", text, re.MULTILINE)
    return None if match is None else int(match[1]) * 1024


@functools.cache
def _accelerator(name: str) -> DeepSpeedAccelerator:
    return CUDAAccelerator() if name == "cuda" else CPUAccelerator()


def get_accelerator() -> DeepSpeedAccelerator:
    """CUDA if there are GPUs, else the CPU; the environment variable DS_ACCELERATOR, "cuda" or "cpu", overrides this.

    Raises:
        ValueError: DS_ACCELERATOR names another device.

    >>> get_accelerator().is_available()
    True
    """
    name = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cuda", "cpu"):
        raise ValueError(f"DS_ACCELERATOR={name!r} in the environment: use 'cuda' or 'cpu'")
    return _accelerator(name)


def is_current_accelerator_supported() -> bool:
    """Always True: ``get_accelerator`` raises an error for others."""
    return True
