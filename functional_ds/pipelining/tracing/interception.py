"""Intercepts a forward: calls of modules, calls of torch functions, and the operators that run inside a call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from functional_ds.base.torch_private import TorchDispatchMode, disable_torch_function, saved_tensors_hooks_in_force, storage_id
from functional_ds.comm.record.group import call_site
from functional_ds.remat.operator_arguments import tensors_given, tensors_written

# Operators that read nothing but shape, dtype and device of their first argument.
_SHAPE_ONLY = frozenset(
    [f"{what}_like" for what in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")]
    + [f"new_{what}" for what in ("empty", "zeros", "ones", "full", "empty_strided")]
    + ["device"]
)


def intercept(module: nn.Module, path: str, called: Callable[..., Any]) -> None:
    """Routes each call of a module through ``called(path, call, args, kwargs)``.

    Args:
        module: changed in place (its class is replaced), so it must be a copy that is not used elsewhere.
        path: the module's path.
        called: calls ``call(*args, **kwargs)`` to run the module.
    """
    cls = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return called(path, partial(cls.__call__, self), args, kwargs)

    members = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    object.__setattr__(module, "__class__", type(cls.__name__, (cls,), members))


class FunctionCalls(TorchFunctionMode):
    """Routes each call of a torch function through ``called(function, args, kwargs)``."""

    def __init__(self, called: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.called = called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.called(func, args, kwargs or {})


class OperatorLog(TorchDispatchMode):
    """Records what the operators of one call read and write.

    Attributes:
        touched: storages whose values an operator has read or written.
        written: storages that an operator has written.
        pure: whether the call can be repeated: no operator drew random numbers or updated running statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        """Starts the record of another call."""
        self.touched: set[int] = set()
        self.written: set[int] = set()
        self.pure = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with disable_torch_function():
            self._note(func, args, kwargs)
            return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func.overloadpacket.__name__
        self.pure &= torch.Tag.nondeterministic_seeded not in func.tags and "batch_norm" not in name
        read = (*args[name in _SHAPE_ONLY :], *kwargs.values())
        self.touched |= set(map(storage_number, tensors_given(read)))
        self.written |= set(map(storage_number, tensors_written(func, args, kwargs)))


def storage_number(tensor: Tensor) -> int:
    """A number of the tensor's storage, which its views share; it is unique while the tensor lives."""
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no single storage
        return id(tensor)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def no_checkpoint() -> Any:
    """A context for the whole forward, by which ``under_checkpoint`` recognises that no hooks were set inside it."""
    return saved_tensors_hooks(_same, _same)


def under_checkpoint(name: str) -> bool:
    """Whether ``torch.utils.checkpoint`` makes this call, and will repeat it in the backward pass.

    Raises:
        ValueError: the forward has set other saved-tensor hooks, which a stage would not see.
    """
    hooks = saved_tensors_hooks_in_force()
    if hooks is None or hooks[0] is _same:
        return False
    if hooks[0].__qualname__.startswith("_checkpoint_hook"):
        return True
    raise ValueError(
        f"{call_site()}: {name} is called under saved_tensors_hooks, which do not reach a stage; set them in a module"
    )
