"""A config written out with nothing left open."""

from typing import Any

from .batch_sizes import BatchSizes
from .config_key import Fate
from .config_reader import Settings
from .config_table import key_of

__all__ = ["canonical"]

_RENAMED = {
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        lambda value: value,
    ),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", lambda value: "cpu" if value else "none"),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param.device", lambda value: "cpu" if value else "none"),
}
_LEFT_OUT = ("optimizer.params", "scheduler.params", "zero_optimization.cpu_offload_use_pin_memory")


def canonical(settings: Settings, batch: BatchSizes) -> dict[str, Any]:
    """A dict that DeepSpeed reads as it reads the config, without what it raises for or never reads."""
    found: dict[str, Any] = {}
    for path, value in settings.values.items():
        key = key_of(path)
        if key is not None and (key.fate is Fate.REFUSED or path in _LEFT_OUT):
            if path.endswith(".params") and path.partition(".")[0] == "scheduler" and not _has_below(settings, path):
                _put(found, path, value)  # a scheduler of torch's
            continue
        if path in _RENAMED:
            path, convert = _RENAMED[path]
            value = convert(value)
        elif key is not None and key.aliases:
            path = f"{key.block}.{key.aliases[0]}"
        _put(found, path, list(value) if isinstance(value, tuple) else value)
    return found | {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
    }


def _has_below(settings: Settings, path: str) -> bool:
    return any(each.startswith(f"{path}.") for each in settings.values)


def _put(block: dict[str, Any], path: str, value: Any) -> None:
    *above, name = path.split(".")
    for each in above:
        block = block.setdefault(each, {})
    block[name] = value
