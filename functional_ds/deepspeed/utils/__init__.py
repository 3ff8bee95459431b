"""``deepspeed.utils``: its logger, groups, loaders that start over."""

from functional_ds.deepspeed.engine.gathered_parameters import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

from . import groups
from .logs import OnDevice, log_dist, log_dist_once, logger, set_log_level_from_string
from .module_paths import recursive_getattr, recursive_setattr
from .repeating_loader import RepeatingLoader

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "groups",
    "log_dist",
    "log_dist_once",
    "logger",
    "recursive_getattr",
    "recursive_setattr",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_log_level_from_string",
]
