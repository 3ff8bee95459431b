"""Functions from steps to steps."""

from . import offloading
from .accumulate import accumulate
from .clip import clip
from .ema import averaged, ema
from .feedback import feedback
from .local import local
from .loss_scale import DynamicScale, LossScale, NoScale, StaticScale
from .offload import offload
from .offloading import OffloadError
from .pipeline import pipeline
from .policy import Policy
from .precision import mixed_precision
from .remat import remat
from .schedule import schedule, warmup_cosine
from .schedules import one_cycle, range_test, warmup, warmup_decay
from .tensor_parallel import tensor_parallel
from .zero import Zero, zero

__all__ = [
    "DynamicScale",
    "LossScale",
    "NoScale",
    "OffloadError",
    "Policy",
    "StaticScale",
    "Zero",
    "accumulate",
    "averaged",
    "clip",
    "ema",
    "feedback",
    "local",
    "mixed_precision",
    "offload",
    "offloading",
    "one_cycle",
    "pipeline",
    "range_test",
    "remat",
    "schedule",
    "tensor_parallel",
    "warmup",
    "warmup_cosine",
    "warmup_decay",
    "zero",
]
