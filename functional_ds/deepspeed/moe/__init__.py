"""``deepspeed.moe``: DeepSpeed's mixture-of-experts layer."""

from . import layer, utils
from .layer import MoE

__all__ = ["MoE", "layer", "utils"]
