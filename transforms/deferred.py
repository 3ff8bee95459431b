"""Tensors that are fetched when somebody first computes with them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Deferred"]

_T = torch.Tensor
# What can be answered from the shape, dtype and device alone, without fetching anything.
_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
    *("is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "itemsize", "nbytes", "grad", "names"),
)
_METADATA: frozenset[Any] = frozenset(
    [
        *(getattr(_T, name).__get__ for name in _PROPERTIES if hasattr(_T, name)),
        *(_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.stride, _T.is_contiguous, _T.element_size, _T.get_device),
        *(_T.is_floating_point, _T.is_complex, _T.is_signed, _T.__len__, _T.__hash__, _T.type),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    ]
)


class Deferred(torch.Tensor):
    """A leaf that the loss sees: shape, dtype and device are known, the values are fetched at first use.

    Every torch function that gets one gets the real tensor instead; there are no hooks on modules, so any code that
    computes with tensors will do.
    """

    _fetch: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool, fetch: Callable[[], Tensor]
    ) -> "Deferred":
        self: Deferred = _T._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        self._fetch = fetch
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Deferred({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*(_real(x) for x in args), **{name: _real(x) for name, x in (kwargs or {}).items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*(_real(x) for x in args), **{name: _real(x) for name, x in (kwargs or {}).items()})


def _real(value: Any) -> Any:
    """The value with every deferred tensor in it fetched."""
    if isinstance(value, Deferred):
        return value._fetch()
    if isinstance(value, (list, tuple)) and any(isinstance(v, (Deferred, list, tuple, dict)) for v in value):
        real = [_real(v) for v in value]
        return type(value)(*real) if hasattr(value, "_fields") else type(value)(real)
    if isinstance(value, dict):
        return {k: _real(v) for k, v in value.items()}
    return value
