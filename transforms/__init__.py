"""Functions from steps to steps."""

from functional_ds.transforms.offloading import OffloadError
from functional_ds.transforms.precision.loss_scale import DynamicScale, LossScale, NoScale, StaticScale
from functional_ds.transforms.precision.mixed_precision import mixed_precision
from functional_ds.transforms.precision.policy import Policy
from functional_ds.transforms.zero.zero import Zero, zero

from . import offloading
from .accumulate import accumulate
from .clip import clip
from .compressed_gradients import compressed_gradients
from .ema import averaged, ema
from .local_gradients import local_gradients
from .offload import offload
from .pipeline import pipeline
from .remat import remat
from .replicated import replicated
from .schedule import one_cycle, range_test, schedule, warmup, warmup_cosine, warmup_decay
from .tensor_parallel import tensor_parallel

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
    "compressed_gradients",
    "ema",
    "local_gradients",
    "mixed_precision",
    "offload",
    "offloading",
    "one_cycle",
    "pipeline",
    "range_test",
    "remat",
    "replicated",
    "schedule",
    "tensor_parallel",
    "warmup",
    "warmup_cosine",
    "warmup_decay",
    "zero",
]
