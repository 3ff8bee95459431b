"""``deepspeed.ops.adam``: both are AdamW, unless ``adam_w_mode`` is false; torch's fused kernel updates them."""

from typing import Any

from .named_optimizer import NamedOptimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class FusedAdam(NamedOptimizer, rule="Adam"):
    """DeepSpeed's Adam for GPUs; here for any device.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedAdam([w], lr=0.5)
    >>> w.sum().backward()
    >>> _ = optimizer.step()
    >>> [round(x, 6) for x in w.tolist()]
    [0.5, 0.5]
    """

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
        self.adam_w_mode, self.set_grad_none = adam_w_mode, set_grad_none
        self._begin(params, locals())


class DeepSpeedCPUAdam(NamedOptimizer, rule="Adam"):
    """DeepSpeed's Adam for ZeRO-Offload; where states are is the config's to say."""

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
        self.adam_w_mode = adamw_mode
        self._begin(model_params, {**locals(), "adam_w_mode": adamw_mode})
