"""``deepspeed.ops.lion``: ``fds.lion``."""

from typing import Any

from .named_optimizer import NamedOptimizer, refuse_option

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(NamedOptimizer):
    """DeepSpeed's Lion for GPUs; here for any device."""

    rule_name = "Lion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.fixed, self.set_grad_none = {}, set_grad_none
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class DeepSpeedCPULion(NamedOptimizer):
    """DeepSpeed's Lion for ZeRO-Offload; where states are is the config's to say."""

    rule_name = "Lion"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            refuse_option("DeepSpeedCPULion", "fp32_optimizer_states=False", "use the config's bf16.bf16_optimizer_states")
        self.fixed = {}
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
