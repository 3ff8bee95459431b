"""Weighted sums, for means over batches of different sizes."""

from typing import Any

import torch
from torch import Tensor

from . import tree
from .device import overlaps


@tree.record
class Weighted:
    """A weighted mean as a sum and its weight: the value is ``sum / weight``.

    If batches have different numbers of tokens, a loss function returns ``Weighted(sum over tokens, number of tokens)``.
    Gradients and metrics are summed in this form over micro-batches and ranks, and divided once at the end, so that every
    token has the same weight: ``∇L(B) = Σ wᵢ ∇L(Bᵢ)`` with ``wᵢ = tokensᵢ / Σ tokens``. The weight of a loss is a constant; one
    that requires grad raises an error.

    >>> a, b = Weighted(torch.tensor(6.0), torch.tensor(2.0)), Weighted(torch.tensor(1.0), torch.tensor(1.0))
    >>> tree.map(torch.add, a, b).mean()
    tensor(2.3333)

    Attributes:
        sum: a tensor, or a pytree of tensors.
        weight: the divisor, a scalar.
        skip: for gradients given to an optimizer: a bool scalar, whether to skip the update; None for never.
        unused: for gradients given to an optimizer: the leaves that the loss did not use, an ``Unused``; None for none.
    """

    sum: Any
    weight: Any
    skip: Any = None
    unused: Any = tree.static(default=None)

    def mean(self) -> Any:
        """The sum divided by the weight, leaf by leaf."""
        return tree.map(lambda leaf: leaf / self.weight, self.sum)


def weigh(value: Any, what: str, *, constant: bool = False) -> Weighted:
    """Converts a scalar to a Weighted of weight 1, and checks a Weighted.

    Args:
        value: the scalar or Weighted.
        what: its name in errors.
        constant: raises an error for a weight that requires grad.
    """
    weighted = value if isinstance(value, Weighted) else Weighted(value, 1.0)
    for name, part in (("sum", weighted.sum), ("weight", weighted.weight)):
        if isinstance(part, Tensor) and part.numel() != 1:
            raise ValueError(
                f"{what} must be a scalar or Weighted(sum, weight); its {name} has shape {list(part.shape)}: reduce it"
            )
    if not isinstance(weighted.sum, Tensor):
        raise TypeError(f"{what} must be a scalar tensor or Weighted(sum, weight), not {type(weighted.sum).__name__}")
    total = weighted.sum.reshape(())
    whole = not (total.is_floating_point() or total.is_complex())
    if total.dtype == torch.bool or (whole and weighted is not value):
        total = total.to(torch.get_default_dtype())  # sums of bools are bools, and means are weighted on some rank
    dtype = weight_dtype(total.dtype)
    if isinstance(weighted.weight, Tensor):
        if constant:
            check_constant(weighted.weight, what)
        return Weighted(total, _number(weighted.weight.reshape(()), total.device, dtype))
    return Weighted(total, torch.full((), float(weighted.weight), dtype=dtype, device=total.device))


def check_constant(weight: Any, what: str) -> None:
    """Checks that a weight does not require grad, since it would get no gradient.

    Raises:
        ValueError: it requires grad.
    """
    if isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{what} is Weighted(sum, weight) with a weight that requires grad, and weights are constants: the gradient is "
            "that of the sum, divided by the weight. Return the mean itself, sum / weight, to differentiate both; or "
            "Weighted(sum, weight.detach()), if the weight is meant as a constant"
        )


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the weight of a sum of this dtype: fp64 for fp64, else fp32.

    >>> weight_dtype(torch.complex128), weight_dtype(torch.bfloat16), weight_dtype(torch.int64)
    (torch.float64, torch.float32, torch.float32)
    """
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _number(weight: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The weight on a device. A CPU scalar is passed to a kernel by value, since a copy would block the host."""
    if weight.device.type == "cpu" and overlaps(device):
        return torch.zeros((), dtype=dtype, device=device).add_(weight)
    return weight.to(device, dtype)
