"""``deepspeed.runtime``: its learning-rate schedules, and reports of memory."""

from typing import TYPE_CHECKING

from functional_ds.deepspeed.api_names import lazily

from . import lr_schedules, utils

__all__ = ["lr_schedules", "utils"]
if not TYPE_CHECKING:
    __getattr__ = lazily("runtime")
