"""``deepspeed.runtime.lr_schedules``: the schedules of a config as objects, and the command line's options for them."""

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from functional_ds.deepspeed.config.schedules.ds_schedules import (
    SCHEDULERS,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "override_params",
    "parse_arguments",
]

_NAMES = "LR_RANGE_TEST=LRRangeTest ONE_CYCLE=OneCycle WARMUP_LR=WarmupLR WARMUP_DECAY_LR=WarmupDecayLR"
_NAMES += " WARMUP_COSINE_LR=WarmupCosineLR WARMUP_LOG_RATE=log WARMUP_LINEAR_RATE=linear"
_NAMES += " LR_SCHEDULE=lr_schedule EDGE_VALUE=edge_value MID_VALUE=mid_value"
CONSTANTS: Mapping[str, str] = MappingProxyType(
    {name.upper(): name for scheduler in SCHEDULERS.values() for name in scheduler.arguments if name != "last_batch_iteration"}
    | dict(pair.split("=") for pair in _NAMES.split())
)
VALID_LR_SCHEDULES = list(SCHEDULERS)


def __getattr__(name: str) -> str:
    """DeepSpeed's constants for the schedules and their arguments: ``WARMUP_NUM_STEPS`` is "warmup_num_steps"."""
    if name not in CONSTANTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return CONSTANTS[name]


# DeepSpeed's defaults on the command line are others than those in a config.
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {name: row["option"] for schedule in SCHEDULERS.values() for name, row in schedule.arguments.items() if "option" in row}
)
_NEVER = ("cycle_momentum", "total_num_steps", "last_batch_iteration")  # DeepSpeed leaves them out of the block


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--lr_schedule`` and an option for each argument of a schedule.

    >>> add_tuning_arguments(argparse.ArgumentParser()).parse_args(["--warmup_num_steps", "7"]).warmup_num_steps
    7
    """
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help="LR schedule for training.")
    for name, default in _DEFAULTS.items():
        if isinstance(default, bool):
            group.add_argument(f"--{name}", action="store_true")
        else:
            group.add_argument(f"--{name}", type=float if name.endswith("_lr") else type(default), default=default)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The options on the command line, and the remaining arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_params(args: Any, params: dict[str, Any]) -> None:
    """Puts the options' values into a ``params`` block."""
    params.update({name: getattr(args, name) for name in _DEFAULTS if name not in _NEVER and _given(args, name)})


def _given(args: Any, name: str) -> bool:
    return getattr(args, name, None) is not None


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """The options' ``scheduler`` block, and None; or None, and what is wrong.

    >>> get_config_from_args(argparse.Namespace(lr_schedule="WarmupLR", warmup_num_steps=7))
    ({'type': 'WarmupLR', 'params': {'warmup_num_steps': 7}}, None)
    """
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in SCHEDULERS:
        return None, f"{name} is not supported LR schedule"
    keys = [key for key in SCHEDULERS[name].arguments if key not in _NEVER]
    return {"type": name, "params": {key: getattr(args, key) for key in keys if _given(args, key)}}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The largest rate of a ``scheduler`` block, and ""; or None, and what is wrong."""
    for name in ("type", "params"):
        if name not in config:
            return None, f"LR schedule {name} not defined in config"
    if config["type"] not in SCHEDULERS:
        return None, f"{config['type']} is not a valid LR schedule"
    largest = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr", "WarmupCosineLR": None}
    key = largest.get(config["type"], "warmup_max_lr")
    if key is None:
        return None, f"{config['type']} scales the optimizer's learning rate by a ratio, so its params define no lr"
    return config["params"][key], ""
