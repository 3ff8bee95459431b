"""Replacements for "auto"."""

from collections.abc import Mapping
from typing import Any

from .explain import ConfigError
from .keys.config_table import key_of, nearest

__all__ = ["auto_values"]

_PARAMS = ("optimizer.params.", "scheduler.params.")


def auto_values(auto: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """By canonical path: the caller's values, then three sizes from the model's hidden size, as in transformers.

    Raises:
        ConfigError: an unknown path.
    """
    values: dict[str, Any] = {}
    hidden = None if model is None else _hidden_size(model)
    if hidden:
        values["zero_optimization.reduce_bucket_size"] = hidden * hidden
        values["zero_optimization.prefetch_bucket_size"] = int(0.9 * hidden * hidden)
        values["zero_optimization.param_persistence_threshold"] = 10 * hidden
    for path, value in auto.items():
        key = key_of(path)
        if key is None and not path.startswith(_PARAMS):
            raise ConfigError(f"auto: {path!r}: {nearest(path)}")
        values[path if key is None else key.path] = value
    return values


def _hidden_size(model: Any) -> int | None:
    """As in transformers: the largest of several, and a text model's if the whole has none. GPT's ``d_model`` too."""
    config = getattr(model, "config", model)
    for block in (config, getattr(config, "text_config", None)):
        sizes = [getattr(block, "hidden_size", None), *[max(getattr(block, "hidden_sizes", None) or (0,))]]
        hidden = next((int(size) for size in (*sizes, getattr(block, "d_model", None)) if size), None)
        if hidden is not None:
            return hidden
    return None
