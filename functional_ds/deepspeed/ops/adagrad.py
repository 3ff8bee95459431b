"""``deepspeed.ops.adagrad``: ``fds.adagrad``."""

from typing import Any

from .named_optimizer import NamedOptimizer

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(NamedOptimizer, rule="Adagrad"):
    """DeepSpeed's Adagrad for ZeRO-Offload; where states are is the config's to say."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self._begin(model_params, locals())
