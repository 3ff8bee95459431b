"""``deepspeed.ops.adam``: both are AdamW, unless ``adam_w_mode`` is false; torch's fused kernel updates them."""

from .named_optimizer import NamedOptimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class FusedAdam(
    NamedOptimizer,
    rule="Adam",
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-8,
    adam_w_mode=True,
    weight_decay=0.0,
    amsgrad=False,
    set_grad_none=True,
):
    """DeepSpeed's Adam for GPUs; here for any device.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedAdam([w], lr=0.5)
    >>> w.sum().backward()
    >>> _ = optimizer.step()
    >>> [round(x, 6) for x in w.tolist()]
    [0.5, 0.5]
    """


class DeepSpeedCPUAdam(
    NamedOptimizer,
    rule="Adam",
    params="model_params",
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    amsgrad=False,
    adamw_mode=True,
    fp32_optimizer_states=True,
):
    """DeepSpeed's Adam for ZeRO-Offload; the config defines where states are."""
