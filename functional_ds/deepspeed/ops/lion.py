"""``deepspeed.ops.lion``: ``fds.lion``."""

from typing import Any

from .named_optimizer import NamedOptimizer

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(NamedOptimizer, rule="Lion"):
    """DeepSpeed's Lion for GPUs; here for any device."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        self._begin(params, locals())


class DeepSpeedCPULion(NamedOptimizer, rule="Lion"):
    """DeepSpeed's Lion for ZeRO-Offload; where states are is the config's to say."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self._begin(model_params, locals())
