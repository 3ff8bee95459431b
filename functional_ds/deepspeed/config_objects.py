"""DeepSpeed's config classes: blocks of a config as objects whose attributes are the keys."""

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import SimpleNamespace
from typing import Any, TypeVar

from functional_ds import comm

from .config.config_reader import read, source
from .config.ds_plan import from_ds_config
from .config.explain import ConfigError
from .config.keys.config_key import Fate
from .config.keys.config_table import key_of
from .engine.loop.monitors import MONITORS

__all__ = [
    "DeepSpeedBF16Config",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedFP16Config",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "ZeroStageEnum",
    "get_bfloat16_config",
    "get_float16_config",
    "get_zero_config",
]


DeepSpeedConfigError = ConfigError


class ZeroStageEnum(IntEnum):
    """Stages of ZeRO by their names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """Where a config offloads to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """The names in DeepSpeed's ``offload_states``."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


B = TypeVar("B", bound="ConfigBlock")


class ConfigBlock:
    """A block of a config; every key is an attribute, by default DeepSpeed's.

    Raises:
        ConfigError: a key is unknown, or has a value that DeepSpeed rejects; it is a ValueError.

    >>> DeepSpeedZeroConfig(stage=2, stage3_prefetch_bucket_size=7).prefetch_bucket_size
    7
    """

    path: str

    def __init_subclass__(cls, path: str) -> None:
        cls.path = path

    def __init__(self, **keys: Any) -> None:
        self._keys = keys
        config: dict[str, Any] = keys
        for name in reversed(self.path.split(".")):
            config = {name: config}
        self._settings = read(config, auto={}, warn=False)
        wrong = [row for row in self._settings.rows.values() if row.fate is Fate.REFUSED]
        if wrong:
            raise ConfigError(f"{type(self).__name__}: {'; '.join(f'{row.key}: {row.reason}' for row in wrong)}")

    def __getattr__(self, name: str) -> Any:
        key = None if name.startswith("_") else key_of(f"{self.path}.{name}")
        if key is None:
            raise AttributeError(f"{type(self).__name__} has no key {name!r}")
        return self._settings[key.path]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._keys.items())})"


class DeepSpeedZeroOffloadParamConfig(ConfigBlock, path="zero_optimization.offload_param"):
    """``offload_param``."""


class DeepSpeedZeroOffloadOptimizerConfig(ConfigBlock, path="zero_optimization.offload_optimizer"):
    """``offload_optimizer``."""

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap with the update."""
        return bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroConfig(ConfigBlock, path="zero_optimization"):
    """``zero_optimization``."""

    @property
    def overlap_comm(self) -> bool:
        """By default in stage 3."""
        given = self._settings["zero_optimization.overlap_comm"]
        return bool(self.stage == 3 if given is None else given)

    @property
    def offload_param(self) -> DeepSpeedZeroOffloadParamConfig | None:
        """None if the block is omitted."""
        return self._block("offload_param", "cpu_offload_param", DeepSpeedZeroOffloadParamConfig)

    @property
    def offload_optimizer(self) -> DeepSpeedZeroOffloadOptimizerConfig | None:
        """None if the block is omitted."""
        return self._block("offload_optimizer", "cpu_offload", DeepSpeedZeroOffloadOptimizerConfig)

    @property
    def gather_16bit_weights_on_model_save(self) -> bool:
        """Also by its old name."""
        names = ("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
        return any(self._settings[f"{self.path}.{name}"] for name in names)

    def _block(self, name: str, old: str, make: type[B]) -> B | None:
        given = self._keys.get(name)
        if given is None and self._settings[f"{self.path}.{old}"]:
            given = {"device": "cpu"}
        return None if given is None else make(**given)


class DeepSpeedFP16Config(ConfigBlock, path="fp16"):
    """``fp16``."""


class DeepSpeedBF16Config(ConfigBlock, path="bf16"):
    """``bf16``."""


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """A config's ``zero_optimization``."""
    return DeepSpeedZeroConfig(**param_dict.get("zero_optimization", {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """A config's ``fp16``."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """A config's ``bf16``, or ``bfloat16``."""
    return DeepSpeedBF16Config(**param_dict.get("bf16", param_dict.get("bfloat16", {})))


class DeepSpeedConfig:
    """A whole config, checked as in ``initialize``; top-level keys, sizes and blocks are attributes.

    Args:
        config: a path, a dict or base64 text.
        mpu: defines the data-parallel ranks, if it is given.
        mesh_device: has no effect.

    Raises:
        ConfigError: a key is unsupported.

    >>> config = DeepSpeedConfig({"train_batch_size": 4, "zero_optimization": {"stage": 1}})
    >>> config.train_micro_batch_size_per_gpu, config.zero_config.stage, config.gradient_clipping
    (4, 1, 1.0)
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        del mesh_device
        self.world_size = comm.world().size if mpu is None else mpu.get_data_parallel_world_size()
        self._param_dict = source(config)
        self.plan = from_ds_config(self._param_dict, self.world_size, warn=True)
        self.zero_config = get_zero_config(self._param_dict)
        self.float16_config, self.bfloat16_config = get_float16_config(self._param_dict), get_bfloat16_config(self._param_dict)

    @property
    def monitor_config(self) -> SimpleNamespace:
        """The blocks of monitors: ``monitor_config.csv_monitor.job_name``."""
        made = {name: type(name, (ConfigBlock,), {}, path=name) for name in MONITORS}
        return SimpleNamespace(**{name: block(**self._param_dict.get(name, {})) for name, block in made.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "plan":
            raise AttributeError(name)
        if hasattr(self.plan.batch, name):
            return getattr(self.plan.batch, name)
        try:
            return self.plan.value(name)
        except KeyError:
            raise AttributeError(f"DeepSpeedConfig has no top-level key {name!r}; plan.value(path) has every key") from None
