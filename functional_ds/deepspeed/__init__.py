"""DeepSpeed's front door: its configs, read key by key into a plan, its engine, and what scripts import beside it."""

from functional_ds.base.package_index import optional

from . import accelerator, checkpointing, comm, ops, runtime, utils, zero
from .accelerator import get_accelerator
from .api_names import VERSION as __version__
from .comm import init_distributed
from .config import ConfigError, ConfigPlan, ExplainedKey, Explanation, from_ds_config
from .config_arguments import add_config_arguments
from .engine import DeepSpeedEngine, initialize
from .utils import OnDevice, log_dist, logger

with optional("functional_ds.parallel"):
    from . import moe
with optional("functional_ds.pipelining"):
    from . import pipe
    from .pipe import PipelineModule

__all__ = [
    "ConfigError",
    "ConfigPlan",
    "DeepSpeedEngine",
    "ExplainedKey",
    "Explanation",
    "OnDevice",
    "PipelineModule",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "from_ds_config",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]


def __dir__() -> list[str]:
    return __all__
