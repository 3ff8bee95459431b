"""What the optimizers share: tensors as torch's kernels need them, skipped updates, and checks of numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

__all__ = [
    "check",
    "check_betas",
    "counts",
    "divided",
    "found_inf",
    "gradients",
    "guarded",
    "means",
    "reals",
    "widened",
    "zeros",
]


def reals(tensors: list[Tensor]) -> list[Tensor]:
    """Complex tensors as views of pairs of reals, others as they are."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def gradients(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """The sums of gradients, laid out like the parameters and in their dtype, as the fused kernels need them."""
    pairs = zip(grads.sum, params, strict=True)
    return reals([g if g.dtype == p.dtype and g.is_contiguous() else g.to(p.dtype).contiguous() for g, p in pairs])


def divided(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """The gradients divided by their weight, in the parameters' dtype.

    The division is done in fp32 at least, because the weight may be larger than half precision holds.
    """
    wides = [torch.promote_types(p.dtype, torch.float32) for p in params]
    rows = zip(grads.sum, wides, params, strict=True)
    return [(grad.to(wide) / grads.weight.to(wide)).to(p.dtype) for grad, wide, p in rows]


def means(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """The gradients divided by their weight, as reals, for kernels that do not divide."""
    return reals([mean.contiguous() for mean in divided(grads, params)])


def widened(kernel: Callable[..., None], *rows: Sequence[Tensor | None]) -> None:
    """``kernel(*rows)``, which writes into the tensors; half precision on a CPU is copied to fp32 and back.

    Torch's fused SGD leaves whole vectors of half precision numbers unchanged on a CPU.
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
    """Zeros shaped like each parameter; for complex parameters, pairs of reals."""
    return [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in reals(params)]


def counts(params: list[Tensor]) -> list[Tensor]:
    """A count of updates for each parameter: an fp32 scalar on its device, as torch's kernels need it."""
    return [torch.zeros((), dtype=torch.float32, device=p.device) for p in params]


def check(**numbers: float) -> None:
    """Refuses negative numbers, infinity and NaN."""
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value} must be finite and not negative")


def check_betas(betas: tuple[float, float]) -> None:
    """Refuses decay rates of running means outside [0, 1)."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas} must lie in [0, 1)")


def found_inf(grads: Weighted) -> Tensor | None:
    """``grads.skip`` as torch's fused kernels take it: where it is 1.0 they change nothing."""
    return None if grads.skip is None else grads.skip.float()


def guarded(rule: Any, params: list[Tensor], grads: Weighted, state: Any, rate: float | Tensor) -> tuple[list[Tensor], Any]:
    """``rule.update``; params and state stay the same, bit for bit, where ``grads.skip`` is true.

    The host does not wait for the device. An optimizer with ``skips`` skips by itself; for any other the params and the state
    are copied before the update, and the old or the new values are selected after it.
    """
    if grads.skip is None or getattr(rule, "skips", False):
        return rule.update(params, grads, state, rate)  # type: ignore[no-any-return]
    before = tree.map(_copy, (params, state))
    after = tuple(rule.update(params, grads, state, rate))
    chosen: tuple[list[Tensor], Any] = tree.map(lambda old, new: _choose(grads.skip, old, new), before, after)
    return chosen


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _choose(skip: Tensor, old: Any, new: Any) -> Any:
    return torch.where(skip, old, new) if isinstance(new, Tensor) else new
