"""DeepSpeed's constants for a config's keys and values, and its key lookups."""

from collections.abc import Iterable, Mapping
from typing import Any

from .config.config_reader import unique
from .config.ds_optimizers import OPTIMIZERS
from .config.keys.config_table import KEYS

__all__ = ["dict_raise_error_on_duplicate_keys", "get_dict_param", "get_list_param", "get_scalar_param"]


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """A block's value, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict, for ``json.load(object_pairs_hook=)``.

    Raises:
        ConfigError: a duplicate key.
    """
    return unique([*ordered_pairs])


def __getattr__(name: str) -> str:
    """``TRAIN_BATCH_SIZE`` is "train_batch_size", ``ADAM_OPTIMIZER`` "adam", ``ROUTE_TRAIN`` "train"."""
    words = {path.partition(".")[0].upper(): path.partition(".")[0] for path in KEYS} | {
        f"{rule.name}_OPTIMIZER".upper(): rule.name.lower() for rule in OPTIMIZERS if not rule.exact
    }
    words |= {f"ROUTE_{route}".upper(): route for route in ("train", "eval", "predict")}
    if name not in words:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return words[name]
