"""Import and export of params and states: safetensors files, DeepSpeed checkpoints."""

from .deepspeed import from_deepspeed
from .export import export
from .load_params import load_params

__all__ = ["export", "from_deepspeed", "load_params"]
