"""``deepspeed.ops.adagrad``: ``fds.adagrad``."""

from typing import Any

from .named_optimizer import NamedOptimizer, refuse_option

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(NamedOptimizer):
    """DeepSpeed's Adagrad for ZeRO-Offload; where states are is the config's to say."""

    rule_name = "Adagrad"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            refuse_option("DeepSpeedCPUAdagrad", "amsgrad", "DeepSpeed's kernel has no AMSGrad either")
        if not fp32_optimizer_states:
            refuse_option("DeepSpeedCPUAdagrad", "fp32_optimizer_states=False", "use the config's bf16.bf16_optimizer_states")
        self.fixed = {}
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
