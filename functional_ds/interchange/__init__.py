"""Params and states from and to other tools: safetensors files, DeepSpeed's checkpoints."""

from .exporting import export
from .importing import load_params

__all__ = ["export", "load_params"]
