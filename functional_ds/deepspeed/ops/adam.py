"""``deepspeed.ops.adam``: both are AdamW, unless ``adam_w_mode`` is false; torch's fused kernel updates them."""

from typing import Any

from .named_optimizer import NamedOptimizer, refuse_option

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]

_AMSGRAD = "DeepSpeed's kernels have no AMSGrad either"


class FusedAdam(NamedOptimizer):
    """DeepSpeed's Adam for GPUs; here for any device.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedAdam([w], lr=0.5)
    >>> w.sum().backward()
    >>> _ = optimizer.step()
    >>> [round(x, 6) for x in w.tolist()]
    [0.5, 0.5]
    """

    rule_name = "Adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            refuse_option("FusedAdam", "amsgrad", _AMSGRAD)
        self.adam_w_mode, self.set_grad_none = adam_w_mode, set_grad_none
        self.fixed = {"adam_w_mode": adam_w_mode}
        numbers = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, numbers)


class DeepSpeedCPUAdam(NamedOptimizer):
    """DeepSpeed's Adam for ZeRO-Offload; where states are is the config's to say."""

    rule_name = "Adam"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            refuse_option("DeepSpeedCPUAdam", "amsgrad", _AMSGRAD)
        if not fp32_optimizer_states:
            refuse_option("DeepSpeedCPUAdam", "fp32_optimizer_states=False", "use the config's bf16.bf16_optimizer_states")
        self.adam_w_mode = adamw_mode
        self.fixed = {"adam_w_mode": adamw_mode}
        numbers = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, numbers)
