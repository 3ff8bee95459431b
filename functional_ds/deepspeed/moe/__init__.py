"""``deepspeed.moe``: DeepSpeed's layer of experts."""

from . import layer, utils
from .layer import MoE

__all__ = ["MoE", "layer", "utils"]
