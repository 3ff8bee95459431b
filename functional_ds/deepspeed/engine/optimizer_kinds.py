"""The classes of ``engine.optimizer`` for ``isinstance``: the one that DeepSpeed has for the same config.

The classes are empty. ``engine.optimizer`` is one object in every stage; its ``__class__`` answers ``isinstance``.
"""

from typing import Any

__all__ = [
    "BF16_Optimizer",
    "DeepSpeedOptimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
    "ZeROOptimizer",
]


class DeepSpeedOptimizer:
    """A wrapper of an optimizer: in all stages except 0, and in half precision."""

    def __new__(cls, *_: Any, **__: Any) -> "DeepSpeedOptimizer":
        """Raises an error: only ``initialize`` makes them.

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
    """bf16 in stage 1, if ``grad_accum_dtype`` is fp32."""


class FP16_Optimizer(DeepSpeedOptimizer):
    """Half precision in stage 0, with FusedAdam."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """Half precision in stage 0, with any other optimizer."""
