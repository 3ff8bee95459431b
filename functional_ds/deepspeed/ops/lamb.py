"""``deepspeed.ops.lamb``: ``fds.lamb`` with DeepSpeed's bounds and its correction of the rate."""

from typing import Any

from .named_optimizer import NamedOptimizer

__all__ = ["FusedLamb"]


class FusedLamb(NamedOptimizer, rule="Lamb"):
    """DeepSpeed's LAMB."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        self._begin(params, locals())
