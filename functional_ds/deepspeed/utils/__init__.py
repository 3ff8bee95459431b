"""``deepspeed.utils``: its logger, groups, loaders that start over."""

from typing import TYPE_CHECKING

from functional_ds.deepspeed.api_names import lazily
from functional_ds.deepspeed.config.model.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from functional_ds.deepspeed.engine.loop.gathered_parameters import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from functional_ds.deepspeed.engine.loop.local_values import (
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

from . import groups
from .loaders import RepeatingLoader
from .logs import OnDevice, log_dist, log_dist_once, logger, set_log_level_from_string
from .module_paths import clone_tensors_for_torch_save, recursive_getattr, recursive_setattr

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "clone_tensors_for_torch_save",
    "get_z3_leaf_modules",
    "groups",
    "log_dist",
    "log_dist_once",
    "logger",
    "recursive_getattr",
    "recursive_setattr",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]
if not TYPE_CHECKING:
    __getattr__ = lazily("utils")
