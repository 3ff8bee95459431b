"""DeepSpeed's configs: a table of every key, a reader that rejects unknown keys, and the plan that a config becomes."""

from .ds_plan import ConfigPlan, from_ds_config
from .explain import ConfigError, ExplainedKey, Explanation, UsageError

__all__ = ["ConfigError", "ConfigPlan", "ExplainedKey", "Explanation", "UsageError", "from_ds_config"]
