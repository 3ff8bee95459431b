"""Transforms for data parallelism, precision, memory and schedules: each takes a step and returns a new step."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from functional_ds.transforms.precision.loss_scale import DynamicScale, LossScale, NoScale, StaticScale
    from functional_ds.transforms.precision.mixed_precision import mixed_precision
    from functional_ds.transforms.precision.policy import Policy
    from functional_ds.transforms.zero.combine import Combine
    from functional_ds.transforms.zero.zero import Zero, zero

    from . import offloading
    from .accumulate import accumulate
    from .clip import clip
    from .compiled import compiled
    from .data_parallel.compressed_gradients import compressed_gradients
    from .data_parallel.local_gradients import local_gradients
    from .data_parallel.replicated import replicated
    from .ema import averaged, ema
    from .offload import offload
    from .offloading import OffloadError
    from .parallel.experts import Experts, experts
    from .parallel.load_balance import balance
    from .parallel.sequence import sequence
    from .parallel.tensor_parallel import tensor_parallel
    from .pipeline import pipeline
    from .remat import remat
    from .rounds import apart, every
    from .schedule import one_cycle, range_test, schedule, warmup, warmup_cosine, warmup_decay

__all__ = [
    "Combine",
    "DynamicScale",
    "Experts",
    "LossScale",
    "NoScale",
    "OffloadError",
    "Policy",
    "StaticScale",
    "Zero",
    "accumulate",
    "apart",
    "averaged",
    "balance",
    "clip",
    "compiled",
    "compressed_gradients",
    "ema",
    "every",
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

lazy_index(__name__)
