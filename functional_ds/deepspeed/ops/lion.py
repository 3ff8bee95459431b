"""``deepspeed.ops.lion``: ``fds.lion``."""

from .named_optimizer import NamedOptimizer

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(NamedOptimizer, rule="Lion", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True):
    """DeepSpeed's Lion for GPUs; here for any device."""


class DeepSpeedCPULion(
    NamedOptimizer,
    rule="Lion",
    params="model_params",
    lr=1e-3,
    betas=(0.9, 0.999),
    weight_decay=0.0,
    fp32_optimizer_states=True,
):
    """DeepSpeed's Lion for ZeRO-Offload; the config defines where states are."""
