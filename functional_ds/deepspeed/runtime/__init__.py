"""``deepspeed.runtime``: its learning-rate schedules, and reports of memory."""

from . import lr_schedules, utils

__all__ = ["lr_schedules", "utils"]
