"""``deepspeed.utils``: its logger, groups, loaders that start over."""

from . import groups
from .logs import OnDevice, log_dist, log_dist_once, logger, print_dist, set_log_level_from_string
from .repeating_loader import RepeatingLoader

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "groups",
    "log_dist",
    "log_dist_once",
    "logger",
    "print_dist",
    "set_log_level_from_string",
]
