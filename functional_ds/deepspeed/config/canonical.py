"""A config written out completely."""

from collections.abc import Callable
from typing import Any

from .batch_sizes import BatchSizes
from .config_reader import Settings
from .keys.config_key import Fate
from .keys.config_table import key_of

__all__ = ["canonical"]

_RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        bool,
    ),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", lambda value: "cpu" if value else "none"),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param.device", lambda value: "cpu" if value else "none"),
}
_LEFT_OUT = ("optimizer.params", "zero_optimization.cpu_offload_use_pin_memory")


def canonical(settings: Settings, batch: BatchSizes) -> dict[str, Any]:
    """A dict that DeepSpeed reads like the config, without what it raises errors for or never reads."""
    config: dict[str, Any] = {}
    for path, value in settings.values.items():
        if _is_kept(settings, path):
            place, convert = _RENAMED.get(path, (_spelled(path), _as_json))
            _put(config, place, convert(value))
    return config | {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
    }


def _is_kept(settings: Settings, path: str) -> bool:
    key = key_of(path)
    if path == "scheduler.params":  # of a scheduler of torch's, whose arguments have no paths of their own
        return "scheduler.type" in settings and not any(other.startswith("scheduler.params.") for other in settings.values)
    return path not in _LEFT_OUT and (key is None or key.fate is not Fate.REFUSED)


def _spelled(path: str) -> str:
    key = key_of(path)
    return f"{key.block}.{key.aliases[0]}" if key is not None and key.aliases else path


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _put(block: dict[str, Any], path: str, value: Any) -> None:
    *above, name = path.split(".")
    for key in above:
        block = block.setdefault(key, {})
    block[name] = value
