"""``deepspeed.runtime.lr_schedules``: the schedules of a config as objects that set ``optimizer.param_groups[i]["lr"]``."""

from collections.abc import Mapping
from types import MappingProxyType

from functional_ds.deepspeed.config.schedules.ds_schedules import (
    SCHEDULERS,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

from .tuning_arguments import (
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
)

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "override_params",
    "parse_arguments",
]

_NAMES = "LR_RANGE_TEST=LRRangeTest ONE_CYCLE=OneCycle WARMUP_LR=WarmupLR WARMUP_DECAY_LR=WarmupDecayLR"
_NAMES += " WARMUP_COSINE_LR=WarmupCosineLR WARMUP_LOG_RATE=log WARMUP_LINEAR_RATE=linear"
_NAMES += " LR_SCHEDULE=lr_schedule EDGE_VALUE=edge_value MID_VALUE=mid_value"
CONSTANTS: Mapping[str, str] = MappingProxyType(
    {name.upper(): name for kind in SCHEDULERS.values() for name in kind.arguments if name != "last_batch_iteration"}
    | dict(pair.split("=") for pair in _NAMES.split())
)
VALID_LR_SCHEDULES = list(SCHEDULERS)


def __getattr__(name: str) -> str:
    """DeepSpeed's constants for the schedules and their arguments: ``WARMUP_NUM_STEPS`` is "warmup_num_steps"."""
    if name not in CONSTANTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return CONSTANTS[name]
