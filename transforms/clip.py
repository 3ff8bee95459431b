"""Gradient clipping by the global norm."""

from typing import Any

import torch

from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.state import State
from functional_ds.step.step import Metrics, Step, Transform

__all__ = ["clip"]


def clip(limit: float) -> Transform:
    """Scales the gradient down to a 2-norm of at most ``limit``; the norm before is the metric ``grad_norm``.

    Laws: ``g ↦ g · min(1, limit / ‖g‖)``; ``clip ∘ clip = clip``; it commutes with sharding (law 27). The norm is of the
    whole gradient, over all ranks, and the scaling is one division of the gradients' weight, which costs no pass.

    Raises:
        ValueError: the limit is not positive.
    """
    if not limit > 0:
        raise ValueError(f"limit={limit!r}: the norm's limit must be positive")

    def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        norm = step.norm(state, grads.sum) / grads.weight
        shrunk = Weighted(grads.sum, grads.weight * torch.clamp(norm / limit, min=1.0))
        state, metrics = inner(step, state, shrunk)
        return state, {**metrics, "grad_norm": norm}

    return wrap(f"clip({limit})", update=update)
