"""``deepspeed.utils``: its logger, groups, loaders that start over."""

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
    "set_log_level_from_string",
]
