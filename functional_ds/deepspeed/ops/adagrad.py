"""``deepspeed.ops.adagrad``: ``fds.adagrad``."""

from .named_optimizer import NamedOptimizer

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(
    NamedOptimizer,
    rule="Adagrad",
    params="model_params",
    lr=1e-2,
    eps=1e-10,
    weight_decay=0.0,
    amsgrad=False,
    fp32_optimizer_states=True,
):
    """DeepSpeed's Adagrad for ZeRO-Offload; the config defines where states are."""
