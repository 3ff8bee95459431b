"""DeepSpeed's front door: its configs, read key by key into transforms, an optimizer and a schedule."""

from .config import ConfigError, ConfigPlan, ExplainedKey, Explanation, from_ds_config

__all__ = ["ConfigError", "ConfigPlan", "ExplainedKey", "Explanation", "from_ds_config"]


def __dir__() -> list[str]:
    return __all__
