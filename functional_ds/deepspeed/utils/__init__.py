"""``deepspeed.utils``: its logger, groups, repeating loaders, marks of leaf modules, values of parameters."""

# ruff: noqa: F403
from functional_ds.deepspeed.config.model import leaf_modules
from functional_ds.deepspeed.config.model.leaf_modules import *
from functional_ds.deepspeed.engine.loop import parameter_values
from functional_ds.deepspeed.engine.loop.parameter_values import *

from . import groups, logs, module_paths
from .loaders import RepeatingLoader
from .logs import *
from .module_paths import *

__all__ = ["RepeatingLoader", "groups"]
__all__ += leaf_modules.__all__ + parameter_values.__all__ + logs.__all__ + module_paths.__all__
