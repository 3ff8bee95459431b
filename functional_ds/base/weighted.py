"""Sums that remember what they are to be divided by."""

from typing import Any

import torch
from torch import Tensor

from . import tree
from .device import overlaps

__all__ = ["Weighted", "check_constant", "weigh", "weight_dtype"]


@tree.record
class Weighted:
    """A sum and its weight; the value meant is ``sum / weight``.

    A loss function returns ``Weighted(sum over tokens, number of tokens)`` where batches differ in tokens. Gradients and
    metrics travel like this through micro-batches and ranks and are divided once, at the end, so that every token weighs
    the same (law 22: ``∇L(B) = Σ wᵢ ∇L(Bᵢ)``, ``wᵢ = tokensᵢ / Σ tokens``). So a loss's weight is a constant: one that requires
    grad is refused.

    >>> a, b = Weighted(torch.tensor(6.0), torch.tensor(2.0)), Weighted(torch.tensor(1.0), torch.tensor(1.0))
    >>> tree.map(torch.add, a, b).mean()
    tensor(2.3333)

    Attributes:
        sum: a tensor, or a tree of them.
        weight: what it is to be divided by, a scalar.
        skip: where an optimizer is given gradients: a bool scalar, whether to move nothing; None for never.
        unused: where an optimizer is given gradients: the leaves that the loss did not use, an ``Unused``; None for none.
    """

    sum: Any
    weight: Any
    skip: Any = None
    unused: Any = tree.static(default=None)

    def mean(self) -> Any:
        """The sum divided by the weight, leaf by leaf."""
        return tree.map(lambda leaf: leaf / self.weight, self.sum)


def weigh(value: Any, what: str, *, constant: bool = False) -> Weighted:
    """A scalar as a mean of weight one, a Weighted with its weight as a constant; anything else is refused.

    Args:
        value: the scalar or Weighted.
        what: its name in errors.
        constant: refuses a weight that requires grad, which would get none.
    """
    found = value if isinstance(value, Weighted) else Weighted(value, 1.0)
    for name, part in (("sum", found.sum), ("weight", found.weight)):
        if isinstance(part, Tensor) and part.numel() != 1:
            raise ValueError(
                f"{what} must be a scalar or Weighted(sum, weight); its {name} has shape {list(part.shape)}: reduce it"
            )
    if not isinstance(found.sum, Tensor):
        raise TypeError(f"{what} must be a scalar tensor or Weighted(sum, weight), not {type(found.sum).__name__}")
    total = found.sum.reshape(())
    whole = not (total.is_floating_point() or total.is_complex())
    if total.dtype == torch.bool or (whole and found is not value):
        total = total.to(torch.get_default_dtype())  # sums of bools are bools; means are weighed, on other ranks if not here
    dtype = weight_dtype(total.dtype)
    if isinstance(found.weight, Tensor):
        if constant:
            check_constant(found.weight, what)
        return Weighted(total, _number(found.weight.reshape(()), total.device, dtype))
    return Weighted(total, torch.full((), float(found.weight), dtype=dtype, device=total.device))


def check_constant(weight: Any, what: str) -> None:
    """Refuses a weight that would get no gradient, although it requires one.

    Raises:
        ValueError: it is such a weight.
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
    """The weight on a device. From the host it goes with a kernel by value; a copy would stop the host."""
    if weight.device.type == "cpu" and overlaps(device):
        return torch.zeros((), dtype=dtype, device=device).add_(weight)
    return weight.to(device, dtype)
