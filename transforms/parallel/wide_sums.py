"""Sums of half-precision tensors in fp32, for checks that compare sums of the same numbers in another order."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

HALF = frozenset({torch.float16, torch.bfloat16})
_SUMS = frozenset({torch.sum, Tensor.sum})


class WideSums(TorchFunctionMode):
    """A context in which sums of half-precision tensors to a scalar are computed, and returned, in fp32.

    Attributes:
        eps: the largest machine epsilon of a scalar that another function reduced in half precision; 0.0 if there is none.

    >>> x = torch.full((1000,), 1.01, dtype=torch.bfloat16)
    >>> with WideSums() as sums:
    ...     found = x.sum()
    >>> (found.dtype, x.sum().dtype, sums.eps)
    (torch.float32, torch.bfloat16, 0.0)
    """

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The function, or, for a scalar sum in half precision, the same in fp32."""
        given = dict(kwargs or {})
        if given.get("reduction") == "sum":
            losses = func(*args, **{**given, "reduction": "none"})
            return losses.sum(dtype=torch.float32) if losses.dtype in HALF else func(*args, **given)
        value = func(*args, **given)
        if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in HALF and _is_reduced(args):
            if func in _SUMS:
                return func(*args, **{**given, "dtype": torch.float32})
            self.eps = max(self.eps, torch.finfo(value.dtype).eps)
        return value


def _is_reduced(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.dtype in HALF and x.numel() > 1 for x in tree.leaves(args))


def is_half(output: Any) -> bool:
    """Whether what a loss function returned is in half precision."""
    value = output[0] if isinstance(output, tuple) and output else output
    total = value.sum if isinstance(value, Weighted) else value
    return isinstance(total, Tensor) and total.dtype in HALF
