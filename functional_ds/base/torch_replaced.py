"""Context managers that replace private functions of torch: for simulated devices, recomputing backward passes and traces."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import _DISPATCH_META_HANDLERS, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "cuda_without_a_driver",
    "fake_tensors_as_if_on",
    "instead_of_engine",
    "instead_of_grouping",
    "instead_of_make_wrapper_subclass",
    "later_work",
    "lift_on_the_host",
    "mode_left",
]


def cuda_without_a_driver() -> AbstractContextManager[Any]:
    """Inside the block, operations on ``device="cuda"`` reach dispatch modes, even on builds of torch without CUDA."""
    return mock.patch.multiple(torch.cuda, _lazy_init=mock.DEFAULT, _initialized=True)


@contextmanager
def lift_on_the_host() -> Iterator[None]:
    """Inside the block, dispatch modes see the copy to a device in this thread's ``torch.tensor``, as in FakeTensorMode."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _Engine:
    def __init__(self, engine: Any, wrapper: Callable[..., Any]) -> None:
        self._engine, self._wrapper = engine, wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(self._engine.run_backward, *args, **kwargs)


def instead_of_engine(wrapper: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Inside the block, backward passes run as ``wrapper(run_backward, ...)``, as torch exits function modes before a pass."""
    return mock.patch.object(
        torch.autograd.Variable, "_execution_engine", _Engine(torch.autograd.Variable._execution_engine, wrapper)
    )


def instead_of_grouping(change: Callable[[dict[Any, Any]], dict[Any, Any]]) -> AbstractContextManager[Any]:
    """Inside the block, ``change`` is applied to the groups of tensors, by device and dtype, of torch's optimizers."""
    original = torch._C._group_tensors_by_device_and_dtype
    return mock.patch.object(
        torch._C, "_group_tensors_by_device_and_dtype", lambda *args, **kwargs: change(original(*args, **kwargs))
    )


def instead_of_make_wrapper_subclass(wrapper: Callable[..., Tensor]) -> AbstractContextManager[Any]:
    """Inside the block, tensors without memory are made by ``wrapper(make, ...)``."""
    original = Tensor._make_wrapper_subclass
    return mock.patch.object(
        Tensor, "_make_wrapper_subclass", staticmethod(lambda *args, **kwargs: wrapper(original, *args, **kwargs))
    )


@contextmanager
def fake_tensors_as_if_on(host: torch.device) -> Iterator[None]:
    """Inside the block, autograd treats new fake tensors as being on the host, on any device that they report.

    Autograd would abort the process for a device that this build of torch does not support.
    """
    original, dispatch, ask = Tensor._make_subclass, FakeTensor.__torch_dispatch__, torch.ops.prim.device.default
    handle = _DISPATCH_META_HANDLERS[ask]

    def answered(value: Any) -> Any:
        return host if isinstance(value, torch.device) and value.type not in ("cpu", "meta") else value

    def seen(cls: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        value = dispatch(func, *args, **kwargs)
        return answered(value) if func is ask else value

    def make(*args: Any, **kwargs: Any) -> Tensor:
        if "device_for_backend_keys" in kwargs:
            kwargs["device_for_backend_keys"] = host
        made: Tensor = original(*args, **kwargs)
        return made

    with (
        mock.patch.object(Tensor, "_make_subclass", staticmethod(make)),
        mock.patch.object(FakeTensor, "__torch_dispatch__", classmethod(seen)),
        mock.patch.dict(_DISPATCH_META_HANDLERS, {ask: lambda args: answered(handle(args))}),
    ):
        yield


def later_work(wait: Callable[[Any], bool]) -> Any:
    """A ``torch.distributed.Work`` as operators return it, whose ``wait`` calls the function with the timeout."""
    from torch._C._distributed_c10d import PythonCallbackWork  # missing in builds without torch.distributed

    return PythonCallbackWork(wait).boxed()


@contextmanager
def mode_left(mode: TorchDispatchMode) -> Iterator[bool]:
    """Takes a dispatch mode off this thread's stack inside the block if it was entered last; gives whether it was."""
    last = torch._C._len_torch_dispatch_stack() - 1
    left = last >= 0 and torch._C._get_dispatch_stack_at(last) is mode
    if left:
        torch._C._pop_torch_dispatch_stack(None)
    try:
        yield left
    finally:
        if left:
            torch._C._push_on_torch_dispatch_stack(mode)
