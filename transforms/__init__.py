"""Functions from steps to steps."""

from .accumulate import accumulate
from .clip import clip
from .precision import mixed_precision
from .schedule import schedule, warmup_cosine
from .zero import zero

__all__ = ["accumulate", "clip", "mixed_precision", "schedule", "warmup_cosine", "zero"]
