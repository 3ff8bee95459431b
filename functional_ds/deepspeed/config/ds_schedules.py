"""DeepSpeed's learning-rate schedulers as pure functions of how many updates there were, with its own offsets.

DeepSpeed sets a first rate when it makes the scheduler, and moves the scheduler after each update. So update k, from 0, has the
rate of the scheduler's iteration b = k - 1. Rates are absolute, as there; ``T.schedule`` gets them as multiples of the
optimizer's rate.
"""

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from .cycled_betas import BetaCycle
from .keys.config_key import ConfigKey, became, refused

__all__ = ["SCHEDULERS", "RateSchedule", "SchedulerRule", "beta_cycle"]

Rates = Callable[[Tensor], Tensor]  # from k, fp64, to the rate of update k


@attrs.frozen
class RateSchedule:
    """The learning rate of each update.

    Attributes:
        name: the scheduler and its numbers.
        rates: from a tensor, how many updates there were, to the next update's rate.
        reference: the optimizer's rate, which the factors are multiples of.
        of: the rates of a param group, from the group's own rate.
    """

    name: str
    rates: Rates = attrs.field(repr=False, eq=False)
    reference: float
    of: Callable[[float], Rates] = attrs.field(repr=False, eq=False)

    def rate(self, updates: int) -> float:
        """The rate of the update after this many.

        >>> given = {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}
        >>> schedule = SCHEDULERS["WarmupLR"].build(given, 1.0, 1.0)
        >>> [schedule.rate(k) for k in range(7)]
        [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
        """
        return self.rates(torch.tensor(float(updates), dtype=torch.float64)).item()

    def for_group(self, lr: float) -> "RateSchedule":
        """The schedule of a param group whose own rate is ``lr``.

        >>> schedule = SCHEDULERS["WarmupLR"].build({"warmup_num_steps": 2}, 1.0, 1.0)
        >>> schedule.for_group(0.5).rate(9), schedule.for_group(0.0).rate(9)
        (0.5, 0.0)
        """
        return attrs.evolve(self, rates=self.of(lr))

    def __call__(self, updates: int | Tensor) -> Tensor:
        """The rate as a factor of ``reference``, for ``T.schedule``."""
        return (self.rates(torch.as_tensor(updates).to(torch.float64)) / self.reference).float()

    @property
    def __name__(self) -> str:
        return self.name


@attrs.frozen
class SchedulerRule:
    """One scheduler: its arguments, and the rates that they give.

    Attributes:
        name: DeepSpeed's name.
        keys: its arguments; a default of None without a meaning of its own is required.
        make: from the arguments and the optimizer's rate to the rates.
        required: the arguments that DeepSpeed has no default for.
    """

    name: str
    keys: tuple[ConfigKey, ...]
    make: Callable[[dict[str, Any], float], Rates]
    required: tuple[str, ...] = ()

    def build(self, given: dict[str, Any], lr: float, reference: float) -> RateSchedule:
        """The schedule for an optimizer with the rate ``lr``, whose factors are multiples of ``reference``."""
        arguments = {key.name: given.get(key.name, key.default) for key in self.keys}
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name in given)
        return RateSchedule(f"{self.name}({shown})", self.make(arguments, lr), reference, lambda own: self.make(arguments, own))


def _at(tensor: Tensor, value: float) -> Tensor:
    return torch.full_like(tensor, value)


def _rise(b: Tensor, steps: int, shape: str) -> Tensor:
    """DeepSpeed's gamma below ``steps``: logarithmic for every word but "linear"."""
    if shape == "linear":
        return b / steps
    found: Tensor = torch.log(b + 1) * (1.0 / math.log(steps))
    return found


def _warmup(a: dict[str, Any], lr: float) -> Rates:
    high = lr if a["warmup_max_lr"] is None else a["warmup_max_lr"]
    return _between(a["warmup_min_lr"], high, a, _one)


def _one(b: Tensor, steps: int) -> Tensor:
    return torch.ones_like(b)


def _between(low: float, high: float, a: dict[str, Any], after: Callable[[Tensor, int], Tensor]) -> Rates:
    steps = max(2, a["warmup_num_steps"])

    def rates(k: Tensor) -> Tensor:
        b = k - 1
        gamma = torch.where(b < steps, _rise(b, steps, a["warmup_type"]), after(b, steps))
        return torch.where(b < 0, _at(k, low), low + (high - low) * gamma)

    return rates


def _warmup_decay(a: dict[str, Any], lr: float) -> Rates:
    total = a["total_num_steps"]

    def after(b: Tensor, steps: int) -> Tensor:
        left: Tensor = (total - b) / max(1.0, total - steps)
        return left.clamp(min=0)

    return _between(a["warmup_min_lr"], a["warmup_max_lr"], a, after)


def _warmup_cosine(a: dict[str, Any], lr: float) -> Rates:
    total, floor, low = a["total_num_steps"], a["cos_min_ratio"], a["warmup_min_ratio"]
    steps = max(2, a["warmup_num_steps"])

    def rates(k: Tensor) -> Tensor:
        b = k - 1
        part = ((b - steps + 1) / max(1, total - steps)).clamp(max=1)
        cosine = (floor + (1 - floor) * (1 + torch.cos(math.pi * part)) / 2).clamp(min=0)
        ratio = torch.where(b < steps, low + (1 - low) * _rise(b, steps, a["warmup_type"]), cosine)
        return torch.where(b < 0, _at(k, 0.0), lr * ratio)

    return rates


def _one_cycle(a: dict[str, Any], lr: float) -> Rates:
    low, high = a["cycle_min_lr"], a["cycle_max_lr"]
    first = float(a["cycle_first_step_size"])
    second = first if a["cycle_second_step_size"] is None else float(a["cycle_second_step_size"])
    stairs = a["cycle_first_stair_count"]
    second_stairs = stairs if a["cycle_second_stair_count"] is None else a["cycle_second_stair_count"]
    total, every, slope = first + second, a["decay_step_size"], a["decay_lr_rate"]
    top = first / total

    def rates(k: Tensor) -> Tensor:
        x = 1.0 + k / total - torch.floor(1 + k / total)
        rises = x <= top
        scale = torch.where(rises, x / top, (x - 1) / (top - 1) if top < 1 else _at(x, 0.0))
        within = torch.remainder(k, total)
        for count, where in ((stairs, rises), (second_stairs, ~rises)):
            if count > 0:
                falling = (total - within) * count / second if second else _at(x, 0.0)
                place = torch.where(within <= first, within * count / first, falling)
                scale = torch.where(where, torch.floor(place) / count, scale)
        after = low / (1 + slope * ((k - total) / every)) if every and slope else _at(k, low)
        found = torch.where(k - 1 < total, low + (high - low) * scale, after)
        return torch.where(k < 1, _at(k, low), found)

    return rates


def beta_cycle(a: dict[str, Any]) -> BetaCycle:
    """The betas that go with OneCycle's rates, of its arguments; DeepSpeed's defaults for those left out."""
    a = {key.name: key.default for key in SCHEDULERS["OneCycle"].keys} | a
    first, second = a["cycle_first_step_size"], a["cycle_second_step_size"]
    total = float(first + (first if second is None else second))
    height = _one_cycle({**a, "cycle_min_lr": 0.0, "cycle_max_lr": 1.0}, 1.0)
    return BetaCycle(height, total, a["cycle_min_mom"], a["cycle_max_mom"], a["decay_mom_rate"], a["decay_step_size"])


def _range_test(a: dict[str, Any], lr: float) -> Rates:
    low, steps = a["lr_range_test_min_lr"], a["lr_range_test_step_size"]

    def rates(k: Tensor) -> Tensor:
        interval = k / steps
        passed: Tensor = interval.floor() if a["lr_range_test_staircase"] else interval
        found: Tensor = (1 + a["lr_range_test_step_rate"] * passed) * low
        return found

    return rates


_RATE = "The rate of an update."
_STEPS = "Over how many updates; DeepSpeed takes at least 2."


def _key(name: str, kind: Any, default: Any, text: str, **more: Any) -> ConfigKey:
    return became(f"scheduler.params.{name}", kind, default, text, **more)


_RESUMED = refused(
    "scheduler.params.last_batch_iteration", "int", -1, "A state's count of updates says how far a run is; load the state."
)
_SHAPE = _key("warmup_type", "str", "log", "The shape of the rise; DeepSpeed takes every word but `linear` as `log`.")

SCHEDULERS = {
    rule.name: rule
    for rule in (
        SchedulerRule(
            "WarmupLR",
            (
                _key("warmup_min_lr", "rate", 0.0, _RATE),
                _key("warmup_max_lr", "rate", None, "The optimizer's rate where it is left out."),
                _key("warmup_num_steps", "int", 1000, _STEPS, least=1),
                _SHAPE,
                _RESUMED,
            ),
            _warmup,
        ),
        SchedulerRule(
            "WarmupDecayLR",
            (
                _key("total_num_steps", "int", None, "The rate is 0 from there on.", least=0),
                _key("warmup_min_lr", "rate", 0.0, _RATE),
                _key("warmup_max_lr", "rate", 0.001, _RATE),
                _key("warmup_num_steps", "int", 1000, _STEPS, least=1),
                _SHAPE,
                _RESUMED,
            ),
            _warmup_decay,
            ("total_num_steps",),
        ),
        SchedulerRule(
            "WarmupCosineLR",
            (
                _key("total_num_steps", "int", None, "The end of the cosine.", least=0),
                _key("warmup_min_ratio", "float", 0.0, "Of the optimizer's rate."),
                _key("warmup_num_steps", "int", 1000, _STEPS, least=1),
                _key("cos_min_ratio", "float", 0.0001, "Of the optimizer's rate."),
                _SHAPE,
                _RESUMED,
            ),
            _warmup_cosine,
            ("total_num_steps",),
        ),
        SchedulerRule(
            "OneCycle",
            (
                _key("cycle_min_lr", "rate", None, _RATE),
                _key("cycle_max_lr", "rate", None, _RATE),
                _key("decay_lr_rate", "float", 0.0, "How fast the rate falls after the cycle."),
                _key("cycle_first_step_size", "int", 2000, "Updates of the rise.", least=1),
                _key("cycle_second_step_size", "int", None, "Updates of the fall; as many where it is left out.", least=0),
                _key("cycle_first_stair_count", "int", 0, "Stairs of the rise; 0 is a line.", least=0),
                _key("cycle_second_stair_count", "int", None, "Stairs of the fall.", least=0),
                _key(
                    "decay_step_size", "int", 0, "Over how many updates `decay_lr_rate` counts once; 0 does not decay.", least=0
                ),
                _key(
                    "cycle_momentum",
                    "bool",
                    True,
                    "The betas cycle against the rate; it has no effect on optimizers without betas.",
                ),
                _key("cycle_min_mom", "float", 0.8, "The first beta where the rate is highest."),
                _key("cycle_max_mom", "float", 0.9, "The first beta where the rate is lowest."),
                _key("decay_mom_rate", "float", 0.0, "How fast the first beta moves after the cycle."),
                _RESUMED,
            ),
            _one_cycle,
            ("cycle_min_lr", "cycle_max_lr"),
        ),
        SchedulerRule(
            "LRRangeTest",
            (
                _key("lr_range_test_min_lr", "rate", 0.001, "The first rate."),
                _key("lr_range_test_step_size", "int", 2000, "Updates of an interval.", least=1),
                _key("lr_range_test_step_rate", "float", 1.0, "What each interval adds, as a multiple of the first rate."),
                _key("lr_range_test_staircase", "bool", False, "Whether the rate rises once an interval."),
                _RESUMED,
            ),
            _range_test,
        ),
    )
}
