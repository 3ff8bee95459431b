"""What ``engine.optimizer`` is an instance of: the class of DeepSpeed's that the same config has there.

The classes hold nothing. ``engine.optimizer`` is one object in every stage; its ``__class__`` answers ``isinstance``.
"""

from typing import Any

import torch

from functional_ds.deepspeed.config.ds_plan import ConfigPlan
from functional_ds.deepspeed.config.ds_transforms import sums_bf16_in_fp32
from functional_ds.deepspeed.ops.adam import FusedAdam

__all__ = [
    "BF16_Optimizer",
    "DeepSpeedOptimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
    "ZeROOptimizer",
    "kind_of",
]


class DeepSpeedOptimizer:
    """What wraps an optimizer: in all stages but 0, and in half precision."""

    def __new__(cls, *_: Any, **__: Any) -> "DeepSpeedOptimizer":
        """Refused: ``initialize`` makes them.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{cls.__name__}(...): deepspeed.initialize makes it, from the config's stage and dtypes")


class ZeROOptimizer(DeepSpeedOptimizer):
    """Stages 1 to 3."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Stage 3."""


class BF16_Optimizer(ZeROOptimizer):
    """bf16 in stage 1, where ``grad_accum_dtype`` is fp32."""


class FP16_Optimizer(DeepSpeedOptimizer):
    """Half precision in stage 0, with FusedAdam."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """Half precision in stage 0, with any other optimizer."""


def kind_of(plan: ConfigPlan, client: torch.optim.Optimizer | None) -> type | None:
    """The class that DeepSpeed's ``engine.optimizer`` has; None where it is an optimizer of the user's or torch's.

    Args:
        plan: of the config.
        client: the optimizer that was passed to ``initialize``.
    """
    stage = plan.value("zero_optimization.stage")
    if sums_bf16_in_fp32(plan.value):
        return BF16_Optimizer
    if stage:
        return DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
    of_config = str(plan.value("optimizer.type")).lower()
    fused = isinstance(client, FusedAdam) if client is not None else of_config in ("adam", "adamw")
    if plan.value("bf16.enabled") or plan.value("fp16.enabled"):
        return FP16_Optimizer if fused else FP16_UnfusedOptimizer
    return FusedAdam if fused and client is None else None
