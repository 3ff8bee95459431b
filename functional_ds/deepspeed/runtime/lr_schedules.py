"""``deepspeed.runtime.lr_schedules``: DeepSpeed's schedulers as objects that set ``optimizer.param_groups[i]["lr"]``.

The rates are those of ``functional_ds.deepspeed.config``, so that an object in a program and a block of a config are one.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from functional_ds.deepspeed.config.ds_schedules import SCHEDULERS, beta_cycle
from functional_ds.deepspeed.utils.logs import logger

from .tuning_arguments import (
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
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

_ARGUMENTS = (
    *("lr_schedule", "edge_value", "mid_value"),
    *(key.name for rule in SCHEDULERS.values() for key in rule.keys if key.name != "last_batch_iteration"),
)
_NAMES = "LR_RANGE_TEST=LRRangeTest ONE_CYCLE=OneCycle WARMUP_LR=WarmupLR WARMUP_DECAY_LR=WarmupDecayLR"
_NAMES += " WARMUP_COSINE_LR=WarmupCosineLR WARMUP_LOG_RATE=log WARMUP_LINEAR_RATE=linear"
CONSTANTS: Mapping[str, str] = MappingProxyType(
    {name.upper(): name for name in _ARGUMENTS} | {pair.split("=")[0]: pair.split("=")[1] for pair in _NAMES.split()}
)
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

Each = float | Sequence[float]  # one for all param groups, or one for each


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    held = optimizer if hasattr(optimizer, "param_groups") else getattr(optimizer, "optimizer", None)
    if held is None or not hasattr(held, "param_groups"):
        raise TypeError(f"optimizer={optimizer!r}: a scheduler needs an optimizer with param_groups")
    found: list[dict[str, Any]] = held.param_groups
    return found


def _each(value: Any, groups: Sequence[Any], name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * len(groups)
    if len(value) != len(groups):
        raise ValueError(f"{name}={value}: {len(value)} numbers for {len(groups)} param groups")
    return list(value)


class LRScheduler:
    """What DeepSpeed's schedulers have in common: ``step`` after each update, ``get_lr``, ``get_last_lr``, ``state_dict``.

    The first rate is set when the object is made, and a first ``step`` moves to iteration 0; DeepSpeed's rates lag by that.

    Attributes:
        last_batch_iteration: how often ``step`` was called, less one.
    """

    name: str
    shown: str  # DeepSpeed's attributes, as "attribute=argument"; an argument alone is an attribute of its name

    def __init__(
        self, optimizer: Any, last_batch_iteration: int, arguments: Mapping[str, Any], *, lists: Sequence[str]
    ) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        groups = _groups(optimizer)
        columns = {name: _each(value, groups, name) for name, value in arguments.items()}
        for name in set(arguments) - set(lists):
            if isinstance(arguments[name], list | tuple):
                raise TypeError(f"{name}={arguments[name]!r}: one number for all param groups")
        rule = SCHEDULERS[self.name]
        own: dict[str, Any] = {key.name: key.default for key in rule.keys}
        self._rates = [
            rule.make({**own, **{name: column[i] for name, column in columns.items()}}, float(group["lr"]))
            for i, group in enumerate(groups)
        ]
        for pair in self.shown.split():
            attribute, argument = pair.split("=") if "=" in pair else (pair, pair)
            whole = [float(group["lr"]) for group in groups] if arguments[argument] is None else columns[argument]
            setattr(self, attribute, whole if argument in lists else arguments[argument])
        self._last_lr = self._set() if last_batch_iteration == -1 else [group["lr"] for group in groups]

    def get_lr(self) -> list[float]:
        """The rate of each param group at this iteration."""
        updates = torch.tensor(float(self.last_batch_iteration + 1), dtype=torch.float64)
        return [rates(updates).item() for rates in self._rates]

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Moves to the next iteration, or to the one given, and sets the rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._last_lr = self._set()

    def _set(self) -> list[float]:
        rates = self.get_lr()
        for group, rate in zip(_groups(self.optimizer), rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rates

    def state_dict(self) -> dict[str, int]:
        """The iteration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, int]) -> None:
        """Goes on from there; the rates are set by the next ``step``, as DeepSpeed does."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(iteration {self.last_batch_iteration})"


def __getattr__(name: str) -> str:
    """DeepSpeed's constants for the schedules and their arguments: ``WARMUP_NUM_STEPS`` is "warmup_num_steps"."""
    if name not in CONSTANTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return CONSTANTS[name]


def _check_warmup(steps: Any, kind: str, total: int | None = None) -> str:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"warmup_num_steps={steps!r}: a whole number above 0")
    if total is not None and total < max(2, steps):
        logger.warning(f"total_num_steps={total} is less than warmup_num_steps={max(2, steps)}")
    if kind not in ("log", "linear"):
        logger.warning(f"warmup_type={kind!r} is unknown, and counts as 'log'")
        return "log"
    return kind


class WarmupLR(LRScheduler):
    """Rises from ``warmup_min_lr`` to ``warmup_max_lr``, by default the group's own rate, and stays there.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    >>> [(schedule.get_last_lr()[0], schedule.step())[0] for _ in range(7)]
    [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """

    name = "WarmupLR"
    shown = "min_lrs=warmup_min_lr max_lrs=warmup_max_lr warmup_num_steps warmup_type"

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Each = 0.0,
        warmup_max_lr: Each | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        given = {
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": _check_warmup(warmup_num_steps, warmup_type),
        }
        super().__init__(optimizer, last_batch_iteration, given, lists=("warmup_min_lr", "warmup_max_lr"))


class WarmupDecayLR(LRScheduler):
    """``WarmupLR``, then falls to 0 along a line, until ``total_num_steps``."""

    name = "WarmupDecayLR"
    shown = f"{WarmupLR.shown} total_num_steps"

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Each = 0.0,
        warmup_max_lr: Each = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        given = {
            "total_num_steps": total_num_steps,
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": _check_warmup(warmup_num_steps, warmup_type, total_num_steps),
        }
        super().__init__(optimizer, last_batch_iteration, given, lists=("warmup_min_lr", "warmup_max_lr"))


class WarmupCosineLR(LRScheduler):
    """Rises to the group's own rate, then falls along a cosine to ``cos_min_ratio`` of it."""

    name = "WarmupCosineLR"
    shown = "total_num_steps warmup_num_steps warmup_type warmup_min_ratio cos_min_ratio"

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        given = {
            "total_num_steps": total_num_steps,
            "warmup_min_ratio": warmup_min_ratio,
            "warmup_num_steps": warmup_num_steps,
            "cos_min_ratio": cos_min_ratio,
            "warmup_type": _check_warmup(warmup_num_steps, warmup_type, total_num_steps),
        }
        self._ratio = SCHEDULERS[self.name].make(given, 1.0)
        super().__init__(optimizer, last_batch_iteration, given, lists=())

    def get_lr_ratio(self) -> float:
        """What this iteration's rates are of the groups' rates at the start."""
        return self._ratio(torch.tensor(float(self.last_batch_iteration + 1), dtype=torch.float64)).item()


class LRRangeTest(LRScheduler):
    """Raises the rate from ``lr_range_test_min_lr`` on, to find the largest one that trains (Smith 2018)."""

    name = "LRRangeTest"
    shown = (
        "min_lr=lr_range_test_min_lr step_size=lr_range_test_step_size step_rate=lr_range_test_step_rate "
        "staircase=lr_range_test_staircase"
    )

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Each = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        if lr_range_test_step_size < 1:
            raise ValueError(f"lr_range_test_step_size={lr_range_test_step_size}: a number above 0")
        given = {
            "lr_range_test_min_lr": lr_range_test_min_lr,
            "lr_range_test_step_size": lr_range_test_step_size,
            "lr_range_test_step_rate": lr_range_test_step_rate,
            "lr_range_test_staircase": lr_range_test_staircase,
        }
        super().__init__(optimizer, last_batch_iteration, given, lists=("lr_range_test_min_lr",))


class OneCycle(LRScheduler):
    """One rise and fall of the rate, against which the first beta moves, then a decay (Smith 2018)."""

    name = "OneCycle"
    shown = "min_lrs=cycle_min_lr max_lrs=cycle_max_lr decay_lr_rate decay_step_size first_stair_count=cycle_first_stair_count"

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Each,
        cycle_max_lr: Each,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Each = 0.8,
        cycle_max_mom: Each = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            raise ValueError(
                f"cycle_first_step_size={cycle_first_step_size}, cycle_second_step_size={second}: the first is above 0, the "
                "second not below"
            )
        shape: dict[str, Any] = {
            "cycle_first_step_size": cycle_first_step_size,
            "cycle_second_step_size": cycle_second_step_size,
            "cycle_first_stair_count": cycle_first_stair_count,
            "cycle_second_stair_count": cycle_second_stair_count,
        }
        self.first_step_size, self.second_step_size = float(cycle_first_step_size), float(second)
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        groups = _groups(optimizer)
        self.cycle_momentum, self.decay_mom_rate = cycle_momentum and "betas" in groups[0], decay_mom_rate
        if cycle_momentum and not self.cycle_momentum:
            logger.warning(f"cycle_momentum has no effect: {type(optimizer).__name__} has no betas")
        columns = zip(_each(cycle_min_mom, groups, "cycle_min_mom"), _each(cycle_max_mom, groups, "cycle_max_mom"), strict=True)
        decay = {"decay_mom_rate": decay_mom_rate, "decay_step_size": decay_step_size}
        self._betas = [beta_cycle({**shape, **decay, "cycle_min_mom": low, "cycle_max_mom": high}) for low, high in columns]
        rest = {"decay_lr_rate": decay_lr_rate, "decay_step_size": decay_step_size}
        given = {"cycle_min_lr": cycle_min_lr, "cycle_max_lr": cycle_max_lr, **rest, **shape}
        super().__init__(optimizer, last_batch_iteration, given, lists=("cycle_min_lr", "cycle_max_lr"))
        if self.cycle_momentum and last_batch_iteration == -1:
            self._set_betas([betas(0) for betas in self._betas])

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each param group at this iteration; None where they stay."""
        if not self.cycle_momentum:
            return None
        return [betas(self.last_batch_iteration + 1) for betas in self._betas]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Moves to the next iteration, or to the one given, and sets the rates and the betas."""
        super().step(last_batch_iteration)
        found = self.get_mom()
        if found is not None:
            self._set_betas(found)

    def _set_betas(self, betas: Sequence[tuple[float, float]]) -> None:
        for group, pair in zip(_groups(self.optimizer), betas, strict=True):
            group["betas"] = pair
