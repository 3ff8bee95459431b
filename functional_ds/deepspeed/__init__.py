"""DeepSpeed's front door: its configs, read key by key into a plan, and its engine."""

from . import zero
from .config import ConfigError, ConfigPlan, ExplainedKey, Explanation, from_ds_config
from .engine import DeepSpeedEngine, initialize

__all__ = [
    "ConfigError",
    "ConfigPlan",
    "DeepSpeedEngine",
    "ExplainedKey",
    "Explanation",
    "from_ds_config",
    "initialize",
    "zero",
]


def __dir__() -> list[str]:
    return __all__
