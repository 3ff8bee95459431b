"""Transforms: functions from steps to steps, for data parallelism, precision, memory and schedules."""

from functional_ds.base.optional import optional
from functional_ds.transforms.precision.loss_scale import DynamicScale, LossScale, NoScale, StaticScale
from functional_ds.transforms.precision.mixed_precision import mixed_precision
from functional_ds.transforms.precision.policy import Policy
from functional_ds.transforms.zero.zero import Zero, zero

from .accumulate import accumulate
from .clip import clip
from .compressed_gradients import compressed_gradients
from .ema import averaged, ema
from .local_gradients import local_gradients
from .remat import remat
from .replicated import replicated
from .schedule import one_cycle, range_test, schedule, warmup, warmup_cosine, warmup_decay

# Each of these files and folders can be left out of an installation.
with optional("functional_ds.compiling", "functional_ds.transforms.compiled"):
    from .compiled import compiled
with optional("functional_ds.transforms.offloading", "functional_ds.transforms.offload"):
    from . import offloading
    from .offload import offload
    from .offloading import OffloadError
with optional("functional_ds.pipelining", "functional_ds.transforms.pipeline"):
    from .pipeline import pipeline
with optional("functional_ds.parallel", "functional_ds.transforms.parallel"):
    from .parallel.experts import Experts, experts
    from .parallel.load_balance import balance
    from .parallel.sequence import sequence
    from .parallel.tensor_parallel import tensor_parallel

__all__ = [
    "DynamicScale",
    "Experts",
    "LossScale",
    "NoScale",
    "OffloadError",
    "Policy",
    "StaticScale",
    "Zero",
    "accumulate",
    "averaged",
    "balance",
    "clip",
    "compiled",
    "compressed_gradients",
    "ema",
    "experts",
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
    "sequence",
    "tensor_parallel",
    "warmup",
    "warmup_cosine",
    "warmup_decay",
    "zero",
]


def __dir__() -> list[str]:
    return __all__
