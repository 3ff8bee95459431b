"""``deepspeed.ops.lamb``: ``fds.lamb`` with DeepSpeed's bounds and its correction of the rate."""

from typing import Any

from .named_optimizer import NamedOptimizer, refuse_option

__all__ = ["FusedLamb"]


class FusedLamb(NamedOptimizer):
    """DeepSpeed's LAMB."""

    rule_name = "Lamb"

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
        for name, given, why in (
            ("amsgrad", amsgrad, "DeepSpeed's kernels have no AMSGrad either"),
            ("eps_inside_sqrt", eps_inside_sqrt, "eps is added to the root"),
            ("max_grad_norm", max_grad_norm, "use the config's gradient_clipping"),
        ):
            if given:
                refuse_option("FusedLamb", name, why)
        self.fixed = {}
        numbers = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "max_coeff": max_coeff, "min_coeff": min_coeff})
