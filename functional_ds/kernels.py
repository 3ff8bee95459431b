"""What the optimizers share: tensors as torch's kernels want them, and checks of numbers."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .weighted import Weighted

__all__ = ["check", "check_betas", "divided", "gradients", "means", "reals", "widened", "zeros"]


def reals(tensors: list[Tensor]) -> list[Tensor]:
    """As kernels want them: complex numbers as pairs of reals."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def gradients(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """Laid out like the parameters and in their dtype, because the fused kernels walk all in step."""
    return reals([grad.to(p.dtype).contiguous() for grad, p in zip(grads.sum, params, strict=True)])


def divided(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """The gradients divided by their weight, in the parameters' dtype; the weight may be larger than half precision holds."""
    wides = [torch.promote_types(p.dtype, torch.float32) for p in params]
    rows = zip(grads.sum, wides, params, strict=True)
    return [(grad.to(wide) / grads.weight.to(wide)).to(p.dtype) for grad, wide, p in rows]


def means(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """The gradients divided by their weight, for kernels that do not divide."""
    return reals([mean.contiguous() for mean in divided(grads, params)])


def widened(kernel: Callable[..., None], *rows: Sequence[Tensor | None]) -> None:
    """``kernel(*rows)``, which writes into tensors; half precision on a CPU as fp32 copies, which are copied back.

    Torch's fused SGD leaves whole vectors of such numbers as they are.
    """
    wide = [[t.float() if t is not None and _half_on_cpu(t) else t for t in row] for row in rows]
    kernel(*wide)
    for row, other in zip(rows, wide, strict=True):
        for tensor, moved in zip(row, other, strict=True):
            if tensor is not None and moved is not None and moved is not tensor:
                tensor.copy_(moved)


def _half_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float16, torch.bfloat16)


def zeros(params: list[Tensor]) -> list[Tensor]:
    """Zeros for each parameter, complex numbers as pairs of reals."""
    return [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in reals(params)]


def check(**numbers: float) -> None:
    """Refuses negative numbers, infinity and NaN."""
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value} must be finite and not negative")


def check_betas(betas: tuple[float, float]) -> None:
    """Refuses decay rates of running means that are no such."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas} must lie in [0, 1)")
