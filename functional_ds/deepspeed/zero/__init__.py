"""``deepspeed.zero``: blocks in which stage-3 parameters have their values."""

from typing import TYPE_CHECKING

from functional_ds.deepspeed.api_names import lazily
from functional_ds.deepspeed.engine.loop.gathered_parameters import (
    GatheredParameters,
    ZeroParamStatus,
    register_external_parameter,
)
from functional_ds.deepspeed.engine.loop.zero_init import Init

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
if not TYPE_CHECKING:
    __getattr__ = lazily("runtime.zero")


def __dir__() -> list[str]:
    return __all__
