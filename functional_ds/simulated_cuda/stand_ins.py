"""Replacements for torch's CUDA functions in threads with a simulated device. Other threads get torch's own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from functional_ds.base.device_streams import SideStream
from functional_ds.base.torch_replaced import (
    cuda_without_a_driver,
    fake_tensors_as_if_on,
    instead_of_engine,
    instead_of_grouping,
    instead_of_make_wrapper_subclass,
    lift_on_the_host,
)
from functional_ds.base.tree import setting
from functional_ds.comm.simulation.simulator import SimulatedWorld

from .communicators import started
from .gpu import DEVICE, HOST, SimulatedGpu, tensors_in
from .operators import Functions, Operators, is_device
from .streams import SimulatedEvent, SimulatedStream, current_gpu, enter_gpu, on_stream


def _instead(original: Any, ours: Callable[..., Any]) -> Any:
    """``ours(gpu, ...)`` on a thread with a simulated device, else the original."""
    return _around(original, lambda gpu, _, *args, **kwargs: ours(gpu, *args, **kwargs))


def _around(original: Any, ours: Callable[..., Any]) -> Any:
    """``ours(gpu, original, ...)`` on a thread with a simulated device, else the original."""

    def either(*args: Any, **kwargs: Any) -> Any:
        gpu = current_gpu()
        return original(*args, **kwargs) if gpu is None or not gpu.active else ours(gpu, original, *args, **kwargs)

    return either


def _property(name: str, value: Any) -> Any:
    """A property of tensors: this value for those on the device."""
    original = getattr(Tensor, name)

    def get(self: Tensor) -> Any:
        gpu = current_gpu()
        return value if gpu is not None and gpu.holds(self) else original.__get__(self)

    return property(get)


# -- tensors -------------------------------------------------------------------------------------------------------------


class _Move(torch.autograd.Function):
    """A copy between host and device, whose gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.home, ctx.dtype = x.device, x.dtype
        return move(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.home, ctx.dtype), None


def _to(gpu: SimulatedGpu, original: Callable[..., Tensor], self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    options = _options(args, kwargs)
    device = options.pop("device", None)
    here = gpu.holds(self)
    there = here if device is None else is_device(device)
    if not here and not there:
        return original(self, *args, **kwargs)
    if here and there:
        options.pop("non_blocking", None)
        copy, dtype = options.pop("copy", False), options.get("dtype")
        if copy and dtype in (None, self.dtype):
            return self.clone(memory_format=options.get("memory_format") or torch.preserve_format)
        return original(self, **{"dtype": self.dtype, **options})

    def move(x: Tensor) -> Tensor:
        with setting(gpu, moves_to_host=not there):
            return original(x, **{**options, "device": DEVICE if there else HOST, "copy": True})

    return _Move.apply(self, move) if self.requires_grad and torch.is_grad_enabled() else move(self)


def _options(args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of ``Tensor.to`` by their names."""
    options, rest = dict(kwargs), list(args)
    if "other" in options:
        rest.insert(0, options.pop("other"))
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
        options.update(device=other.device, dtype=other.dtype)
    elif rest and not isinstance(rest[0], torch.dtype):
        options["device"] = rest.pop(0)
    names = ["dtype", "non_blocking", "copy"] if "dtype" not in options else ["non_blocking", "copy"]
    options.update(zip(names, rest, strict=False))
    return {name: value for name, value in options.items() if value is not None}


def _cpu(gpu: SimulatedGpu, self: Tensor, memory_format: Any = torch.preserve_format) -> Tensor:
    return self.to(HOST, memory_format=memory_format)


def _cuda(
    gpu: SimulatedGpu, self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> Tensor:
    return self.to(DEVICE, non_blocking=non_blocking, memory_format=memory_format)


def _numpy(gpu: SimulatedGpu, original: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    if gpu.holds(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host first.")
    gpu.launch("numpy", [self], [], gpu.host)
    return original(self, *args, **kwargs)


def _tolist(gpu: SimulatedGpu, original: Any, self: Tensor) -> Any:
    held = gpu.holds(self)
    gpu.launch("tolist", [self], [], None if held else gpu.host)
    if held:
        gpu.block("tolist", self)
    return original(self)


def _record_stream(gpu: SimulatedGpu, self: Tensor, stream: SimulatedStream) -> None:
    if (memory := gpu.memory_of(self)) is not None:
        memory.recorded.add(stream.id)


# -- torch.cuda ----------------------------------------------------------------------------------------------------------


def _set_rng_state(gpu: SimulatedGpu, state: Tensor, device: Any = None) -> None:
    gpu.random = state.clone()


def _seed(gpu: SimulatedGpu, seed: int) -> None:
    gpu.random = torch.Generator().manual_seed(int(seed)).get_state()


def _set_stream(gpu: SimulatedGpu, stream: SimulatedStream) -> None:
    gpu.stream = stream


_CUDA: dict[str, Callable[..., Any]] = {
    "is_available": lambda gpu: True,
    "is_initialized": lambda gpu: True,
    "is_bf16_supported": lambda gpu, *_, **__: True,
    "is_current_stream_capturing": lambda gpu: False,
    "device_count": lambda gpu: 1,
    "current_device": lambda gpu: 0,
    "set_device": lambda gpu, device: None,
    "device": lambda gpu, device: nullcontext(),
    "get_device_name": lambda gpu, device=None: "simulated",
    "get_device_capability": lambda gpu, device=None: (9, 0),
    "current_stream": lambda gpu, device=None: gpu.stream,
    "default_stream": lambda gpu, device=None: gpu.default,
    "set_stream": _set_stream,
    "synchronize": SimulatedGpu.synchronize,
    "get_rng_state": lambda gpu, device=None: gpu.random.clone(),
    "set_rng_state": _set_rng_state,
    "manual_seed": _seed,
    "manual_seed_all": _seed,
    "empty_cache": lambda gpu: None,
    "memory_allocated": lambda gpu, device=None: gpu.allocated,
    "max_memory_allocated": lambda gpu, device=None: gpu.peak,
    "reset_peak_memory_stats": SimulatedGpu.reset_peak,
}


_ACCELERATOR: dict[str, Callable[..., Any]] = {
    **{name: _CUDA[name] for name in ("is_available", "device_count", "current_stream", "set_stream", "synchronize")},
    "current_accelerator": lambda gpu, check_available=False: torch.device("cuda"),
    "current_device_index": lambda gpu: 0,
}


class _Autocast(torch.autocast):
    """Casts on the host when the device is asked for, because its operators are what runs."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        simulated = device_type == "cuda" and current_gpu() is not None
        super().__init__("cpu" if simulated else device_type, *args, **kwargs)


# -- everything ----------------------------------------------------------------------------------------------------------


def _make_wrapper(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A tensor without memory, for example a lazy leaf of ZeRO-3."""
    gpu = current_gpu()
    if gpu is None or kwargs.get("device") is None or not is_device(kwargs["device"]):
        return original(*args, **kwargs)
    made = original(*args, **{**kwargs, "device": HOST})
    gpu.put(made)
    return made


def _grouped(groups: dict[Any, Any]) -> dict[Any, Any]:
    """torch's optimizers group tensors by device, below Python; each group's first list holds its params."""
    gpu = current_gpu()
    if gpu is None:
        return groups
    return {(DEVICE if gpu.holds(group[0][0][0]) else device, dtype): group for (device, dtype), group in groups.items()}


def _backward(original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """A backward pass: its allocations are where its outputs are; hooks call torch functions like any program."""
    gpu = current_gpu()
    if gpu is None or not gpu.active:
        return original(outputs, *args, **kwargs)
    with gpu.intending(any(map(gpu.holds, tensors_in((outputs, *args))))), Functions(gpu):
        return original(outputs, *args, **kwargs)


def _beside(gpu: SimulatedGpu, original: Any, world: Any, steps: Any, lane: Any, device: torch.device) -> Any:
    """A chain of collectives, launched on a side stream as in a world of processes."""
    if device.type != "cuda":
        return original(world, steps, lane, device)
    return SideStream.run(steps, gpu.communicator(("lane", lane.ranks, lane.name), f"{lane.name} (chains)"))


_Table = dict[Any, dict[str, Callable[..., Any]]]  # by what has a function of this name


def _patches() -> Iterator[AbstractContextManager[Any]]:
    instead: _Table = {
        Tensor: {
            "get_device": lambda gpu, self: 0 if gpu.holds(self) else -1,
            "cpu": _cpu,
            "cuda": _cuda,
            "record_stream": _record_stream,
        },
        torch.cuda: _CUDA,
        torch.accelerator: _ACCELERATOR,
        torch.backends.cudnn: {"is_acceptable": lambda gpu, tensor: False},
        dist: {"get_backend_config": lambda gpu, group=None: "cpu:gloo,cuda:nccl"},
    }
    around: _Table = {
        Tensor: {"to": _to, "numpy": _numpy, "tolist": _tolist},
        SimulatedWorld: {"start": started, "beside": _beside},
    }
    for replacing, table in ((_instead, instead), (_around, around)):
        for owner, ours in table.items():
            yield from (mock.patch.object(owner, name, replacing(getattr(owner, name), new)) for name, new in ours.items())
    for name, value in {"device": DEVICE, "is_cuda": True, "is_cpu": False}.items():
        yield mock.patch.object(Tensor, name, _property(name, value))
    yield mock.patch.multiple(torch.cuda, Stream=SimulatedStream, Event=SimulatedEvent, stream=on_stream)
    yield mock.patch.multiple(torch, autocast=_Autocast)
    yield mock.patch.multiple(torch.amp, autocast=_Autocast)
    yield cuda_without_a_driver()
    yield fake_tensors_as_if_on(HOST)
    yield instead_of_grouping(_grouped)
    yield instead_of_engine(_backward)
    yield instead_of_make_wrapper_subclass(_make_wrapper)


class _Installed:
    """The replacements are torch's attributes while any thread has a simulated device."""

    def __init__(self) -> None:
        self._lock, self._count, self._stack = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                for patch in _patches():
                    self._stack.enter_context(patch)
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._stack.close()


_INSTALLED = _Installed()  # torch's attributes are the process's


@contextmanager
def simulated_cuda(*, check: bool = True) -> Iterator[SimulatedGpu]:
    """Simulates a CUDA device on the CPU for this thread, and detects races, early frees and host synchronisation.

    Within the block ``device="cuda"`` works without a GPU: tensors have values and report ``cuda:0`` as their device. Streams
    and events are vector clocks, so a fault is detected whether or not it changes a value in this run:

    - a race: an access that is not ordered after the last conflicting one;
    - an early free: memory that is freed while work on another stream may still use it, without ``record_stream``;
    - a host sync: ``.item()``, a blocking copy, and anything else that makes the host wait without ``synchronize``.

    Each finding names the lines of both accesses. Enter the block on the rank: in the program that ``comm.simulate`` or
    ``comm.spawn`` runs. Collectives then run on a separate stream per communicator, as in NCCL.

    Args:
        check: whether to raise an error at the end of the block if there were races or early frees.

    Raises:
        AssertionError: at the end of the block: all races and early frees, with their lines.

    Cost: about 0.1 ms an operator, in addition to its computation on the host. Backward passes run on the stream that is
    current when they start; background threads see host tensors.

    >>> with simulated_cuda() as gpu:
    ...     x = torch.ones(3, device="cuda")
    ...     total = x.sum().item()
    >>> total, [each.kind for each in gpu.findings]
    (3.0, ['host sync'])
    """
    gpu = SimulatedGpu()
    with _INSTALLED:
        before = enter_gpu(gpu)
        try:
            with lift_on_the_host(), Functions(gpu), Operators(gpu):
                yield gpu
        finally:
            enter_gpu(before)
    if check:
        gpu.check()
