"""``deepspeed.zero``: contexts in which stage-3 parameters have their values."""

from functional_ds.deepspeed.engine.loop.gathered_parameters import GatheredParameters, register_external_parameter
from functional_ds.deepspeed.engine.loop.zero_init import Init, ZeroParamStatus

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
