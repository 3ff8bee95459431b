"""DeepSpeed's engine: ``initialize``, and calls of forward, backward and step over a step in halves."""

from .engine import DeepSpeedEngine
from .initialize import initialize
from .loop.gathered_parameters import (
    GatheredParameters,
    ZeroParamStatus,
    register_external_parameter,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from .loop.zero_init import Init

__all__ = [
    "DeepSpeedEngine",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "initialize",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]


def __dir__() -> list[str]:
    return __all__
