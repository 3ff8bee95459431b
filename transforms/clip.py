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

_EPS = 1e-6  # torch's and DeepSpeed's


def clip(limit: float | Tensor) -> Transform:
    """Clips gradients by their global 2-norm, as ``torch.nn.utils.clip_grad_norm_`` does.

    ``g ↦ g · min(1, limit / (‖g‖ + 1e-6))``, where the norm is over all leaves and all ranks; the metric ``grad_norm`` is ‖g‖
    before clipping. ``clip ∘ clip = clip`` within a relative 1e-6 / limit; clipping commutes with sharding.

    Clipping divides the gradients' scalar weight, so it costs no pass over them. With fp64 gradients it multiplies them, to
    match torch bitwise.

    Raises:
        ValueError: the limit is not positive.

    >>> import functional_ds as fds
    >>> step = clip(1.0)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
    >>> state, metrics = step(step.init({"w": torch.zeros(2)}), torch.tensor([3.0, 4.0]))
    >>> metrics["grad_norm"].item(), [round(w, 4) for w in step.params(state)["w"].tolist()]
    (5.0, [-0.6, -0.8])
    """
    if not (isinstance(limit, Tensor) and is_transformed(limit)) and not limit > 0:
        raise ValueError(f"limit={limit!r}: the norm's limit must be positive")

    def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        norm = step.norm(state, grads.sum) / grads.weight
        if norm.dtype == torch.float64:  # the norm is of all gradients; these may be a slice of them
            factor = torch.clamp(limit / (norm + _EPS), max=1.0)
            shrunk = tree.replace(grads, sum=[(grad * factor).to(grad.dtype) for grad in grads.sum])
        else:
            shrunk = tree.replace(grads, weight=grads.weight * torch.clamp((norm + _EPS) / limit, min=1.0))
        state, metrics = inner(step, state, shrunk)
        return state, {**metrics, "grad_norm": norm}

    return wrap(f"clip({limit!r})", traits=[Trait.HEEDS_SKIPS], update=update)
