"""What the optimizers share: tensors as torch's kernels want them, and checks of numbers."""

import torch
from torch import Tensor

from .weighted import Weighted

__all__ = ["check", "check_betas", "gradients", "means", "reals", "zeros"]


def reals(tensors: list[Tensor]) -> list[Tensor]:
    """As kernels want them: complex numbers as pairs of reals."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def gradients(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """Laid out like the parameters and in their dtype, because the fused kernels walk all in step."""
    return reals([grad.to(p.dtype).contiguous() for grad, p in zip(grads.sum, params, strict=True)])


def means(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """The gradients divided by their weight, for kernels that do not divide."""
    return reals(
        [(grad.to(p.dtype) / grads.weight.to(p.dtype)).contiguous() for grad, p in zip(grads.sum, params, strict=True)]
    )


def zeros(params: list[Tensor]) -> list[Tensor]:
    """Zeros for each parameter, complex numbers as pairs of reals."""
    return [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in reals(params)]


def check(**numbers: float) -> None:
    """Refuses negative numbers, and NaN."""
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name}={value} must not be negative")


def check_betas(betas: tuple[float, float]) -> None:
    """Refuses decay rates of running means that are no such."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas} must lie in [0, 1)")
