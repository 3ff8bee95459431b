"""``deepspeed.accelerator``: the device that a program trains on, CUDA or CPU, behind one set of names."""

from .accelerator import DeepSpeedAccelerator
from .accelerators import CPUAccelerator, CUDAAccelerator, get_accelerator, is_current_accelerator_supported

__all__ = ["CPUAccelerator", "CUDAAccelerator", "DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported"]
