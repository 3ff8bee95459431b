"""Functions from steps to steps."""

from .accumulate import accumulate
from .clip import clip
from .loss_scale import DynamicScale, LossScale, NoScale, StaticScale
from .policy import Policy
from .precision import mixed_precision
from .schedule import schedule, warmup_cosine
from .zero import zero

__all__ = [
    "DynamicScale",
    "LossScale",
    "NoScale",
    "Policy",
    "StaticScale",
    "accumulate",
    "clip",
    "mixed_precision",
    "schedule",
    "warmup_cosine",
    "zero",
]
