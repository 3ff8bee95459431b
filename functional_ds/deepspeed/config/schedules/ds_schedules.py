"""DeepSpeed's learning-rate schedules, one class each: arguments, defaults, rates as functions of the updates, scheduler."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_ds.deepspeed.config.keys.class_arguments import REQUIRED

from .cycled_betas import BetaCycle
from .lr_scheduler import LRScheduler, Rates, columns_of, groups_of

_logger = logging.getLogger("DeepSpeed")


def _rise(b: Tensor, steps: int, shape: str) -> Tensor:
    """DeepSpeed's gamma below ``steps``: logarithmic unless ``shape`` is "linear"."""
    return b / steps if shape == "linear" else torch.log(b + 1) * (1.0 / math.log(steps))


def _between(low: float, high: float, a: dict[str, Any], after: Callable[[Tensor, int], Tensor]) -> Rates:
    """Rises from ``low`` to ``high`` in the warm-up; then ``after`` is the part of ``high - low``."""
    steps = max(2, a["warmup_num_steps"])

    def rates(k: Tensor) -> Tensor:
        b = k - 1
        gamma = torch.where(b < steps, _rise(b, steps, a["warmup_type"]), after(b, steps))
        return torch.where(b < 0, torch.full_like(k, low), low + (high - low) * gamma)

    return rates


def _check_warmup(self: LRScheduler, a: dict[str, Any]) -> None:
    """Its shape is "log" or "linear"."""
    steps, total = a["warmup_num_steps"], a.get("total_num_steps")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"warmup_num_steps={steps!r}: a whole number above 0")
    if total is not None and total < max(2, steps):
        _logger.warning(f"total_num_steps={total} is less than warmup_num_steps={max(2, steps)}")
    if a["warmup_type"] not in ("log", "linear"):
        _logger.warning(f"warmup_type={a['warmup_type']!r} is unknown, and counts as 'log'")
        a["warmup_type"] = "log"


class WarmupLR(LRScheduler, warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type="log"):
    """Rises from ``warmup_min_lr`` to ``warmup_max_lr``, by default the group's own rate, and stays constant.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    >>> [(schedule.get_last_lr()[0], schedule.step())[0] for _ in range(7)]
    [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """

    shown = "min_lrs=warmup_min_lr max_lrs=warmup_max_lr warmup_num_steps warmup_type"

    check = _check_warmup

    @staticmethod
    def rates(a: dict[str, Any], lr: float) -> Rates:
        """A constant after the warm-up."""
        high = lr if a["warmup_max_lr"] is None else a["warmup_max_lr"]
        return _between(a["warmup_min_lr"], high, a, lambda b, steps: torch.ones_like(b))


class WarmupDecayLR(
    LRScheduler, total_num_steps=REQUIRED, warmup_min_lr=0.0, warmup_max_lr=0.001, warmup_num_steps=1000, warmup_type="log"
):
    """``WarmupLR``, then a linear decay to 0 at ``total_num_steps``."""

    shown = f"{WarmupLR.shown} total_num_steps"

    check = _check_warmup

    @staticmethod
    def rates(a: dict[str, Any], lr: float) -> Rates:
        """Linear after the warmup."""
        total = a["total_num_steps"]
        return _between(
            a["warmup_min_lr"], a["warmup_max_lr"], a, lambda b, steps: ((total - b) / max(1.0, total - steps)).clamp(min=0)
        )


class WarmupCosineLR(
    LRScheduler, total_num_steps=REQUIRED, warmup_min_ratio=0.0, warmup_num_steps=1000, cos_min_ratio=0.0001, warmup_type="log"
):
    """Rises to the group's own rate, then follows a cosine to ``cos_min_ratio`` of it."""

    shown = "total_num_steps warmup_num_steps warmup_type warmup_min_ratio cos_min_ratio"

    def check(self, a: dict[str, Any]) -> None:
        """As the other warm-ups."""
        _check_warmup(self, a)
        self._ratio = self.rates(a, 1.0)

    @staticmethod
    def rates(a: dict[str, Any], lr: float) -> Rates:
        """A cosine after the warm-up; all are multiples of ``lr``."""
        total, floor, low = a["total_num_steps"], a["cos_min_ratio"], a["warmup_min_ratio"]
        steps = max(2, a["warmup_num_steps"])

        def rates(k: Tensor) -> Tensor:
            b = k - 1
            part = ((b - steps + 1) / max(1, total - steps)).clamp(max=1)
            cosine = (floor + (1 - floor) * (1 + torch.cos(math.pi * part)) / 2).clamp(min=0)
            ratio = torch.where(b < steps, low + (1 - low) * _rise(b, steps, a["warmup_type"]), cosine)
            return torch.where(b < 0, torch.full_like(k, 0.0), lr * ratio)

        return rates

    def get_lr_ratio(self) -> float:
        """This iteration's rates, relative to the groups' initial rates."""
        return self._ratio(torch.tensor(float(self.last_batch_iteration + 1), dtype=torch.float64)).item()


class OneCycle(
    LRScheduler,
    cycle_min_lr=REQUIRED,
    cycle_max_lr=REQUIRED,
    decay_lr_rate=0.0,
    cycle_first_step_size=2000,
    cycle_second_step_size=None,
    cycle_first_stair_count=0,
    cycle_second_stair_count=None,
    decay_step_size=0,
    cycle_momentum=True,
    cycle_min_mom=0.8,
    cycle_max_mom=0.9,
    decay_mom_rate=0.0,
):
    """One rise and fall of the rate, with an inverse cycle of the first beta, then a decay (Smith 2018)."""

    shown = "min_lrs=cycle_min_lr max_lrs=cycle_max_lr decay_lr_rate decay_step_size first_stair_count=cycle_first_stair_count"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.cycle_momentum and self.last_batch_iteration == -1:
            self._set_betas([betas(0) for betas in self._betas])

    def check(self, a: dict[str, Any]) -> None:
        """Its halves have updates."""
        first, second, *_ = _halves(a)
        if first <= 0 or second < 0:
            sizes = f"cycle_first_step_size={first:g}, cycle_second_step_size={second:g}"
            raise ValueError(f"{sizes}: the first is above 0, the second not below")
        self.first_step_size, self.second_step_size, self.total_size = first, second, first + second
        self.step_ratio = first / self.total_size
        groups, cycles = groups_of(a["optimizer"]), a["cycle_momentum"]
        self.cycle_momentum, self.decay_mom_rate = cycles and "betas" in groups[0], a["decay_mom_rate"]
        if cycles and not self.cycle_momentum:
            _logger.warning(f"cycle_momentum has no effect: {type(a['optimizer']).__name__} has no betas")
        moments = zip(*(columns_of(a[name], groups, name) for name in ("cycle_min_mom", "cycle_max_mom")), strict=True)
        self._betas = [beta_cycle({**a, "cycle_min_mom": low, "cycle_max_mom": high}) for low, high in moments]

    @staticmethod
    def rates(a: dict[str, Any], lr: float) -> Rates:
        """A cycle, then a decay; none depends on ``lr``."""
        low, high = a["cycle_min_lr"], a["cycle_max_lr"]
        first, second, stairs, second_stairs = _halves(a)
        total, every, slope = first + second, a["decay_step_size"], a["decay_lr_rate"]
        top = first / total

        def rates(k: Tensor) -> Tensor:
            x = 1.0 + k / total - torch.floor(1 + k / total)
            rises = x <= top
            scale = torch.where(rises, x / top, (x - 1) / (top - 1) if top < 1 else torch.full_like(x, 0.0))
            within = torch.remainder(k, total)
            for count, where in ((stairs, rises), (second_stairs, ~rises)):
                if count > 0:
                    falling = (total - within) * count / second if second else torch.full_like(x, 0.0)
                    place = torch.where(within <= first, within * count / first, falling)
                    scale = torch.where(where, torch.floor(place) / count, scale)
            after = low / (1 + slope * ((k - total) / every)) if every and slope else torch.full_like(k, low)
            cycle = torch.where(k - 1 < total, low + (high - low) * scale, after)
            return torch.where(k < 1, torch.full_like(k, low), cycle)

        return rates

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each param group at this iteration; None if they are constant.

        Before the first step it returns the highest, as DeepSpeed's does, although the groups have the lowest.
        """
        if not self.cycle_momentum:
            return None
        after = self.last_batch_iteration + 1
        return [betas(after) if after else (betas.high, 0.99) for betas in self._betas]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Moves to the next iteration, or to the one given, and sets the rates and the betas."""
        super().step(last_batch_iteration)
        betas = self.get_mom()
        if betas is not None:
            self._set_betas(betas)

    def _set_betas(self, betas: Sequence[tuple[float, float]]) -> None:
        for group, pair in zip(groups_of(self.optimizer), betas, strict=True):
            group["betas"] = pair


def _halves(a: dict[str, Any]) -> tuple[float, float, int, int]:
    """Updates and stairs of OneCycle's rise and fall."""
    first, second = float(a["cycle_first_step_size"]), a["cycle_second_step_size"]
    stairs, second_stairs = a["cycle_first_stair_count"], a["cycle_second_stair_count"]
    return first, first if second is None else float(second), stairs, stairs if second_stairs is None else second_stairs


def beta_cycle(a: dict[str, Any]) -> BetaCycle:
    """The betas that go with OneCycle's rates, from its arguments; DeepSpeed's defaults for omitted ones."""
    a = {key.name: key.default for key in OneCycle.keys} | a
    first, second, *_ = _halves(a)
    height = OneCycle.rates({**a, "cycle_min_lr": 0.0, "cycle_max_lr": 1.0}, 1.0)
    return BetaCycle(height, first + second, a["cycle_min_mom"], a["cycle_max_mom"], a["decay_mom_rate"], a["decay_step_size"])


class LRRangeTest(
    LRScheduler,
    lr_range_test_min_lr=1e-3,
    lr_range_test_step_size=2000,
    lr_range_test_step_rate=1.0,
    lr_range_test_staircase=False,
):
    """Raises the rate from ``lr_range_test_min_lr`` on, to find the highest one that trains (Smith 2018)."""

    shown = (
        "min_lr=lr_range_test_min_lr step_size=lr_range_test_step_size step_rate=lr_range_test_step_rate "
        "staircase=lr_range_test_staircase"
    )

    def check(self, a: dict[str, Any]) -> None:
        """Its intervals have updates."""
        if a["lr_range_test_step_size"] < 1:
            raise ValueError(f"lr_range_test_step_size={a['lr_range_test_step_size']}: a number above 0")

    @staticmethod
    def rates(a: dict[str, Any], lr: float) -> Rates:
        """A line or stairs; none depends on ``lr``."""
        low, steps = a["lr_range_test_min_lr"], a["lr_range_test_step_size"]

        def rates(k: Tensor) -> Tensor:
            interval = k / steps
            passed: Tensor = interval.floor() if a["lr_range_test_staircase"] else interval
            risen: Tensor = (1 + a["lr_range_test_step_rate"] * passed) * low
            return risen

        return rates


SCHEDULERS: dict[str, type[LRScheduler]] = {
    scheduler.__name__: scheduler for scheduler in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
