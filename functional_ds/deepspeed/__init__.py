"""The DeepSpeed-compatible API: configs, read key by key into a plan, the engine, and other names of ``deepspeed``."""

import sys

from functional_ds.base.package_index import optional

from . import accelerator, checkpointing, comm, ops, runtime, utils, zero
from .accelerator import get_accelerator
from .api_names import VERSION as __version__
from .api_names import answer_missing_names
from .comm import init_distributed
from .config import ConfigError, ConfigPlan, ExplainedKey, Explanation, UsageError, from_ds_config
from .config_arguments import add_config_arguments
from .config_objects import DeepSpeedConfig, DeepSpeedConfigError
from .engine import DeepSpeedEngine, initialize
from .module_finder import ModuleFinder
from .utils import OnDevice, log_dist, logger

with optional("functional_ds.parallel"):
    from . import moe
with optional("functional_ds.pipelining"):
    from . import pipe
    from .pipe import PipelineEngine, PipelineModule

__git_hash__ = __git_branch__ = None
__version_major__, __version_minor__, __version_patch__ = (int(number) for number in __version__.split("."))

__all__ = [
    "ConfigError",
    "ConfigPlan",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "ExplainedKey",
    "Explanation",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "UsageError",
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

answer_missing_names()
if (_finder := ModuleFinder(__name__)) not in sys.meta_path:
    sys.meta_path.append(_finder)  # after the finders of files, so it is asked for what is missing


def __dir__() -> list[str]:
    return __all__
