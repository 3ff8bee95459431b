"""What torch's operators read, write, allocate and wait for on a simulated device."""

from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_ds.base.torch_private import (
    TorchDispatchMode,
    detect_fake_mode,
    disable_torch_function,
    is_fake,
    schema_of,
    storage_id,
)
from functional_ds.base.tree import setting

from .communicators import collective
from .gpu import DEVICE, HOST, SimulatedGpu, has_own_dispatch, tensors_in

# Their kernels copy a size or a value to the host.
_WAITS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim"),
    *("unique_consecutive", "bincount", "_linalg_check_errors"),
}
_PAGEABLE = 2**16  # bytes: up to here the driver copies pageable host memory without waiting for the device


@attrs.frozen
class _Operator:
    """What an operator's schema says.

    Attributes:
        name: without its namespace.
        written: the places of arguments that it writes to.
        written_names: their names.
        launches: whether it computes; views and ``empty`` do not.
        reads: whether it reads its arguments' values; ``zeros_like`` does not.
        random: whether it draws from torch's default generator.
    """

    name: str
    written: frozenset[int]
    written_names: frozenset[str]
    launches: bool
    reads: bool
    random: bool

    @staticmethod
    @cache
    def of(func: Any) -> "_Operator":
        schema = schema_of(func)
        name = schema.name.partition("::")[2]
        written = [(i, x.name) for i, x in enumerate(schema.arguments) if x.alias_info is not None and x.alias_info.is_write]
        empty = name.startswith(("empty", "new_empty")) or name in {"set_", "resize_"}
        fills = name.startswith("new_") or name.endswith("_like")
        view = func.is_view or name in {"detach", "alias", "lift_fresh", "lift", "_reshape_alias", "_unsafe_view", "view"}
        places, names = frozenset(i for i, _ in written), frozenset(n for _, n in written)
        return _Operator(name, places, names, not (view or empty), not fills, torch.Tag.nondeterministic_seeded in func.tags)


def _memory_id(tensor: Tensor) -> int:
    return storage_id(tensor) if tensor.layout is torch.strided else id(tensor)


class Functions(TorchFunctionMode):
    """Intercepts torch functions as the program calls them, to see where it wants new memory."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self.gpu = gpu
        self._given_on: Any = None  # the function that a tensor subclass is carrying out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.gpu.active:
            return func(*args, **kwargs)
        subclass = next((cls for cls in types if _has_own_functions(cls)), None)
        if subclass is not None and func != self._given_on:  # not ``is``: getters are made at each access
            return self._give_on(subclass, func, types, args, kwargs)
        device = kwargs.get("device")
        if device is None:
            intent = any(map(self.gpu.holds, tensors_in((*args, *kwargs.values()))))
        elif intent := is_device(device):
            kwargs = {**kwargs, "device": DEVICE}
        with self.gpu.intending(intent, assigns=func is Tensor.__setitem__):
            return func(*args, **kwargs)

    def _give_on(self, subclass: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Passes the function to a tensor subclass, and intercepts the functions that it calls."""
        with setting(self, _given_on=func), self:
            result = subclass.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _has_own_functions(cls: Any) -> bool:
    plain: Any = Tensor.__torch_function__
    return getattr(cls.__torch_function__, "__func__", None) not in (None, plain.__func__)


def is_device(device: Any) -> bool:
    """Whether a ``device`` argument means the simulated device."""
    return isinstance(device, int) or torch.device(device).type == "cuda"


class Operators(TorchDispatchMode):
    """Executes operators on the host's memory, and records what they do on the device."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = kwargs or {}, self.gpu
        given = list(tensors_in((*args, *kwargs.values())))
        if not gpu.active or any(map(is_fake, given)) or detect_fake_mode() is not None:
            return func(*args, **kwargs)  # the fake mode, which comes after this one, knows devices itself
        if any(map(has_own_dispatch, given)):
            return NotImplemented
        if func.namespace == "c10d":
            return collective(gpu, func, args, kwargs)
        with disable_torch_function():
            return self._carried_out(func, args, kwargs, given)

    def _carried_out(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        gpu = self.gpu
        operator, held = _Operator.of(func), [gpu.holds(tensor) for tensor in given]
        if operator.name == "is_pinned":
            memory = gpu.memory_of(args[0])
            return memory is not None and not memory.device
        if operator.name == "_to_copy":
            return self._copied(func, args, kwargs)
        intent = gpu.intended
        on_device = any(held) if intent is None else intent
        if (device := kwargs.get("device")) is not None:
            on_device = device.type == "cuda" or (on_device and device.type == "cpu")
            kwargs = {**kwargs, "device": HOST if device.type == "cuda" else device}
        pinned = kwargs.pop("pin_memory", None) is True or operator.name == "_pin_memory"
        if operator.name != "copy_":
            _check_devices(operator, given, held, args)
        if operator.random and on_device:
            with gpu.drawing():
                out = func(*args, **kwargs)
        else:
            out = args[0].clone() if operator.name == "_pin_memory" else func(*args, **kwargs)
        before = {_memory_id(tensor) for tensor in given}
        fresh = [tensor for tensor in tensors_in(out) if _memory_id(tensor) not in before or not tensor.numel()]
        if pinned or on_device:
            for tensor in fresh:
                if not tensor.is_meta and gpu.memory_of(tensor) is None:
                    gpu.put(tensor, device=not pinned)
        self._note(operator, args, kwargs, given, held, fresh, on_device=on_device and not pinned)
        return out

    def _note(self, operator: _Operator, args: Any, kwargs: Any, given: Any, held: Any, fresh: Any, *, on_device: bool) -> None:
        gpu = self.gpu
        if not operator.launches:
            return
        written = [*fresh, *tensors_in([args[i] for i in operator.written if i < len(args)])]
        written += tensors_in([kwargs[name] for name in operator.written_names if name in kwargs])
        if operator.name == "copy_" and held[0] != held[1]:
            self._cross(args[0], args[1], non_blocking=bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
            return
        gpu.launch(operator.name, given if operator.reads else [], written, None if on_device or any(held) else gpu.host)
        if any(held) and (operator.name in _WAITS or _waits(operator, args, kwargs)):
            gpu.block(operator.name, next(x for x, on in zip(given, held, strict=True) if on))

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``_to_copy``. A call by torch itself with the CPU for a tensor on the device changes only its dtype."""
        gpu, source = self.gpu, args[0]
        device, asked = gpu.holds(source), kwargs.get("device")
        target = not gpu.moves_to_host and (device or (asked is not None and asked.type == "cuda"))
        pinned = kwargs.get("pin_memory") is True
        options = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
        if device == target and options.get("dtype") in (None, source.dtype) and device and asked is not None:
            return torch.ops.aten.alias.default(source)  # torch.as_tensor(x, device="cuda")
        out = func(*args, **options)
        if target or pinned:
            gpu.put(out, device=target)
        if device == target:
            gpu.launch("_to_copy", [source], [out], None if device else gpu.host)
        else:
            self._cross(out, source, non_blocking=bool(kwargs.get("non_blocking")))
        return out

    def _cross(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """A copy between host and device."""
        gpu = self.gpu
        gpu.launch("copy", [source], [target])
        host, device = (source, target) if gpu.holds(target) else (target, source)
        if host is source and gpu.assigns and not source.dim():
            return  # x[i] = 1.0 fills
        memory = gpu.memory_of(host)
        way = "to the device" if host is source else "to the host"
        if not non_blocking:
            gpu.block(f"a blocking copy {way}", source if host is target else None)
        elif memory is None and (host is target or source.nbytes > _PAGEABLE):
            gpu.block(f"a copy {way} with non_blocking=True, of host memory that is not pinned,", device)


def _waits(operator: _Operator, args: Any, kwargs: Any) -> bool:
    """Operators that wait for some arguments only."""
    if operator.name in {"index", "index_put", "index_put_", "_index_put_impl_"}:
        masks = [x for x in tensors_in(args[1]) if x.dtype in (torch.bool, torch.uint8)]
        fills = operator.name != "index" and len(args) > 2 and args[2].dim() == 0 and len(masks) == 1
        return bool(masks) and not fills
    if operator.name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return False


def _check_devices(operator: _Operator, given: list[Tensor], held: list[bool], args: Any) -> None:
    """Raises RuntimeError, as CUDA would, for tensors of both devices; scalars of the host's are passed as numbers."""
    if not any(held) or all(held):
        return
    indices = set(map(id, tensors_in(args[1]))) if operator.name.startswith(("index", "_index_put")) and len(args) > 1 else ()
    written = {id(tensor) for i in operator.written if i < len(args) for tensor in tensors_in(args[i])}
    for tensor, on in zip(given, held, strict=True):
        if not on and (tensor.dim() or id(tensor) in written) and id(tensor) not in indices:
            raise RuntimeError(
                f"{operator.name}: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"cpu: a tensor of shape {list(tensor.shape)} is the host's"
            )
