"""Gradient clipping by the global norm."""

from typing import Any

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import is_transformed
from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

__all__ = ["clip"]

_EPS = 1e-6  # torch's and DeepSpeed's


def clip(limit: float | Tensor) -> Transform:
    """Scales the gradient down to a 2-norm of at most ``limit``; the norm before is the metric ``grad_norm``.

    Laws: ``g ↦ g · min(1, limit / (‖g‖ + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_`` does; ``clip ∘ clip = clip`` within a
    relative 1e-6 / limit; it commutes with sharding (law 27). The norm is of the whole gradient, over all ranks. The scaling is
    one division of the gradients' weight, which costs no pass; only where there are fp64 gradients these are multiplied, as
    torch does, for its bits.

    Raises:
        ValueError: the limit is not positive.
    """
    if not (isinstance(limit, Tensor) and is_transformed(limit)) and not limit > 0:
        raise ValueError(f"limit={limit!r}: the norm's limit must be positive")

    def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        norm = step.norm(state, grads.sum) / grads.weight
        if norm.dtype == torch.float64:  # of all leaves' gradients, of which these may be a piece
            factor = torch.clamp(limit / (norm + _EPS), max=1.0)
            shrunk = tree.replace(grads, sum=[(grad * factor).to(grad.dtype) for grad in grads.sum])
        else:
            shrunk = tree.replace(grads, weight=grads.weight * torch.clamp((norm + _EPS) / limit, min=1.0))
        state, metrics = inner(step, state, shrunk)
        return state, {**metrics, "grad_norm": norm}

    return wrap(f"clip({limit!r})", traits=[Trait.HEEDS_SKIPS], update=update)
