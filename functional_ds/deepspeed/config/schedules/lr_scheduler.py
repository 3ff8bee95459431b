"""The base of DeepSpeed's schedulers: arguments by their signatures, rates, and the object that sets them.

DeepSpeed sets a first rate when it makes the scheduler, and steps the scheduler after each update. So update k, from 0, has the
rate of the scheduler's iteration b = k - 1. Rates are absolute, same as DeepSpeed; ``T.schedule`` gets them relative to the
optimizer's rate.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.deepspeed.config.keys.class_arguments import REQUIRED, bound, sign
from functional_ds.deepspeed.config.keys.config_key import ConfigKey
from functional_ds.deepspeed.config.keys.config_table import argument_key, schedule_rows

Rates = Callable[[Tensor], Tensor]  # from k, fp64, to the rate of update k


@attrs.frozen
class RateSchedule:
    """The learning rate of each update.

    Attributes:
        name: the scheduler and its numbers.
        rates: from a tensor, the number of updates so far, to the next update's rate.
        reference: the optimizer's rate, to which the factors are relative.
        of: the rates of a param group, from the group's own rate.
    """

    name: str
    rates: Rates = attrs.field(repr=False, eq=False)
    reference: float
    of: Callable[[float], Rates] = attrs.field(repr=False, eq=False)

    def rate(self, updates: int) -> float:
        """The rate of the update after this many.

        >>> from functional_ds.deepspeed.config.schedules.ds_schedules import WarmupLR
        >>> schedule = WarmupLR.build({"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}, 1.0, 1.0)
        >>> [schedule.rate(k) for k in range(7)]
        [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
        """
        return self.rates(torch.tensor(float(updates), dtype=torch.float64)).item()

    def for_group(self, lr: float) -> "RateSchedule":
        """The schedule of a param group whose own rate is ``lr``.

        >>> from functional_ds.deepspeed.config.schedules.ds_schedules import WarmupLR
        >>> schedule = WarmupLR.build({"warmup_num_steps": 2}, 1.0, 1.0)
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


class LRScheduler:
    """One of DeepSpeed's schedules, as an object: ``step`` after each update, ``get_lr``, ``get_last_lr``, ``state_dict``.

    A subclass describes a schedule: its definition has the arguments with their defaults, documented in the table of keys, and
    ``rates`` has the rates. The constructor, the config's keys, the tuning options and the documentation follow from these.

    The first rate is set when the object is made, and a first ``step`` moves to iteration 0, so DeepSpeed's rates lag by one.

    Attributes:
        last_batch_iteration: how often ``step`` was called, less one.
    """

    arguments: dict[str, dict[str, Any]]  # by name, what the table of keys says
    keys: tuple[ConfigKey, ...]  # of a config's scheduler.params
    required: tuple[str, ...]  # the arguments that DeepSpeed has no default for
    shown: str  # DeepSpeed's attributes, as "attribute=argument"; an argument alone is an attribute of its name

    def __init_subclass__(cls, **given: Any) -> None:
        rows, given = schedule_rows(cls.__name__), {**given, "last_batch_iteration": -1}
        sign(cls, "optimizer", given)
        cls.arguments = {name: rows[name] for name in given}
        cls.required = tuple(name for name, default in given.items() if default is REQUIRED)
        defaults = {name: None if name in cls.required else default for name, default in given.items()}
        cls.keys = tuple(argument_key("scheduler.params", name, rows[name], default) for name, default in defaults.items())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bound(type(self), args, kwargs)
        self.check(given)
        self._begin(given)

    def check(self, a: dict[str, Any]) -> None:
        """Raises an error for invalid arguments, and normalises others for ``rates``."""

    @staticmethod
    def rates(a: dict[str, Any], lr: float) -> Rates:
        """From all arguments and the optimizer's rate to the rates."""
        raise NotImplementedError

    @classmethod
    def build(cls, given: dict[str, Any], lr: float, reference: float) -> RateSchedule:
        """The schedule for an optimizer with the rate ``lr``, with factors relative to ``reference``."""
        arguments = {key.name: given.get(key.name, key.default) for key in cls.keys}
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name in given)
        return RateSchedule(
            f"{cls.__name__}({shown})", cls.rates(arguments, lr), reference, lambda rate: cls.rates(arguments, rate)
        )

    def _begin(self, given: Mapping[str, Any]) -> None:
        """Sets the first rates of ``given["optimizer"]``, of the constructor's arguments."""
        self.optimizer, self.last_batch_iteration = given["optimizer"], given["last_batch_iteration"]
        groups = groups_of(self.optimizer)
        columns = {name: columns_of(given[name], groups, name) for name in self.arguments}
        for name, row in self.arguments.items():
            if isinstance(given[name], list | tuple) and "each" not in row:
                raise TypeError(f"{name}={given[name]!r}: one number for all param groups")
        starts = [float(group["lr"]) for group in groups]
        self._rates = [self.rates({name: column[i] for name, column in columns.items()}, lr) for i, lr in enumerate(starts)]
        for pair in self.shown.split():
            attribute, _, argument_name = pair.partition("=")
            name = argument_name or attribute
            whole = starts if given[name] is None else columns[name]
            setattr(self, attribute, whole if "each" in self.arguments[name] else given[name])
        self._last_lr = self._set() if self.last_batch_iteration == -1 else [group["lr"] for group in groups]

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
        for group, rate in zip(groups_of(self.optimizer), rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rates

    def state_dict(self) -> dict[str, int]:
        """The iteration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, int]) -> None:
        """Continues from there; the next ``step`` sets the rates, as in DeepSpeed."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(iteration {self.last_batch_iteration})"


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The param groups of an optimizer, or of a wrapper of one.

    Raises:
        TypeError: there are none.
    """
    inner = optimizer if hasattr(optimizer, "param_groups") else getattr(optimizer, "optimizer", None)
    if inner is None or not hasattr(inner, "param_groups"):
        raise TypeError(f"optimizer={optimizer!r}: a scheduler needs an optimizer with param_groups")
    groups: list[dict[str, Any]] = inner.param_groups
    return groups


def columns_of(value: Any, groups: Sequence[Any], name: str) -> list[Any]:
    """An argument's value for each param group.

    Raises:
        ValueError: it is a list of another length.
    """
    if not isinstance(value, list | tuple):
        return [value] * len(groups)
    if len(value) != len(groups):
        raise ValueError(f"{name}={value}: {len(value)} numbers for {len(groups)} param groups")
    return list(value)
