"""``DeepSpeedAccelerator``: torch's device module, with DeepSpeed's names."""

import difflib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
# Names of torch's module; functions of a device, by default the current one; other names of some of these.
_TORCHS = ("Event", "Stream", "current_device", "device_count", "empty_cache", "is_available", "stream")
_OF_DEVICE = (
    *("current_stream", "default_stream", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"),
    *("memory_stats", "reset_peak_memory_stats", "synchronize"),
)
_ALIASES = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}
_COMPILED = ("create_op_builder", "get_op_builder", "build_extension")
_REFUSED = dict.fromkeys(_COMPILED, "kernels are torch's and Triton's; nothing is compiled here") | {
    "pin_empty": "use torch.empty(..., pin_memory=True)",
    "pin_empty_like": "use torch.empty_like(..., pin_memory=True)",
    "unpin_memory": "pinned memory is freed with its tensor",
    "register_host_memory": "use pin_memory",
    "unregister_host_memory": "use pin_memory",
}


class DeepSpeedAccelerator(ABC):
    """A device type. ``module`` is torch's: ``torch.cuda`` or ``torch.cpu``.

    >>> from functional_ds.deepspeed.accelerator.accelerators import CPUAccelerator
    >>> accelerator = CPUAccelerator()
    >>> accelerator.device_name(3), accelerator.communication_backend_name(), accelerator.is_bf16_supported()
    ('cpu', 'gloo', True)
    >>> accelerator.FloatTensor([1.0, 2.0])
    tensor([1., 2.])
    """

    _name: str
    _communication_backend_name: str

    @property
    def module(self) -> Any:
        """Torch's module for the device."""
        return torch.get_device_module(self._name)

    @property
    def _random(self) -> Any:
        """The torch module with the device's generator functions."""
        return torch if self._name == "cpu" else self.module

    # -- devices

    def device_name(self, device_index: int | None = None) -> str:
        """The device type, or with an index the device."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    @abstractmethod
    def device(self, device_index: int | None = None) -> Any:
        """The device, for torch."""

    def set_device(self, device_index: int) -> None:
        """Makes a device the current one."""
        self.module.set_device(device_index)

    def current_device_name(self) -> str:
        """The current device."""
        return self.device_name(self.current_device())

    def is_synchronized_device(self) -> bool:
        """Whether all work is complete when a call returns."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def communication_backend_name(self) -> str:
        """The backend of ``init_distributed``."""
        return self._communication_backend_name

    # -- random numbers

    def random(self) -> Any:
        """torch.random."""
        return torch.random

    @abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """The device's generator."""

    def manual_seed(self, seed: int) -> Any:
        """Seeds the current device's generator."""
        return self._random.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Seeds every device's generator."""
        return self.manual_seed(seed) if self._name == "cpu" else self.module.manual_seed_all(seed)

    @abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of a device's generator."""

    @abstractmethod
    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Sets the state of a device's generator."""

    def initial_seed(self) -> int:
        """The seed of the generator."""
        return int(self._random.initial_seed())

    # -- memory, in bytes

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        return int(self.module.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that can still be allocated."""
        return int(self.module.mem_get_info(device_index)[0])

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """A copy in pinned memory; on the CPU the tensor itself."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the tensor is in pinned memory."""
        return self._name != "cpu" and tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether the tensor is on such a device."""
        return tensor.device.type == self._name

    # -- dtypes

    def is_bf16_supported(self) -> bool:
        """Whether bf16 is supported."""
        return True

    def is_fp16_supported(self) -> bool:
        """Whether fp16 is supported."""
        return True

    def is_fp64_supported(self) -> bool:
        """Always."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The floating-point dtypes that it computes."""
        half = [torch.float16] if self.is_fp16_supported() else []
        return [torch.float32, *half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    # -- the rest

    def is_triton_supported(self) -> bool:
        """Whether Triton's kernels run on it."""
        return False

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Opens a range in the device's profiler; nothing on the CPU."""
        return None

    def range_pop(self, domain: Any = None) -> None:
        """Closes it."""
        return None

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls the function once the device is in use."""
        return callback()

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return False

    def visible_devices_envs(self) -> list[str]:
        """The environment variables that choose devices."""
        return [] if self._name == "cpu" else ["CUDA_VISIBLE_DEVICES"]

    def get_compile_backend(self) -> str:
        """The backend of torch.compile."""
        return "inductor"

    def __getattr__(self, name: str) -> Any:
        if name in _DTYPES:
            return functools.partial(torch.tensor, dtype=_DTYPES[name], device=self._name)
        if name in _TORCHS:
            return getattr(self.module, name)
        if name in _OF_DEVICE:
            return lambda device_index=None: getattr(self.module, name)(device_index)
        if name in _ALIASES:
            return getattr(self, _ALIASES[name])
        if name in _REFUSED:
            raise AttributeError(f"get_accelerator().{name}: {_REFUSED[name]}")
        near = difflib.get_close_matches(name, dir(self), 1)
        raise AttributeError(f"get_accelerator() has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))

    def __dir__(self) -> list[str]:
        named = [name for name in super().__dir__() if not name.startswith("_")]
        return sorted({*named, *_DTYPES, *_TORCHS, *_OF_DEVICE, *_ALIASES})

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
