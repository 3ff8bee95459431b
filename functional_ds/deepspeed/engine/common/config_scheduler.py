"""A config's scheduler as an object next to the engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from functional_ds.deepspeed.config.ds_optimizers import rule_of
from functional_ds.deepspeed.config.schedules.ds_schedules import SCHEDULERS
from functional_ds.deepspeed.config.schedules.lr_scheduler import RateSchedule

from .optimizer_groups import LiveGroup


@attrs.define(eq=False)
class ConfigScheduler:
    """The config's schedule with the interface of DeepSpeed's schedulers. The engine steps it after each update.

    The step itself has the schedule, as a function of its count of updates. This object only reports it, until the program
    steps it or writes another rate, which then applies.

    Attributes:
        schedule: of the plan.
        multiples: whether a group's rates are always the same multiples of its own.

    It is an instance of the class that the config names, such as ``WarmupLR``, with its attributes.
    """

    schedule: RateSchedule
    multiples: bool
    _groups: Sequence[LiveGroup] = attrs.field(alias="groups", repr=False)
    _settle: Callable[[], None] = attrs.field(alias="settle", repr=False)
    _make: Callable[[Any], Any] = attrs.field(alias="make", repr=False)  # of the scheduler that the config names
    _twin: Any = attrs.field(default=None, init=False, repr=False)
    _lrs: list[float] = attrs.field(factory=list, init=False, repr=False)  # of each group at the start
    _updates: int = 0  # of the step
    _moved: int = 0  # how often other code called ``step``
    _own: list[RateSchedule] = attrs.field(factory=list, repr=False)  # of each group
    _host: list[bool] = attrs.field(factory=list, repr=False)  # whether the step's own rates are not the right ones for it

    def __attrs_post_init__(self) -> None:
        for group in self._groups:
            lr = float(group.given["lr"])
            self._lrs.append(lr)
            self._own.append(self.schedule if group.base == self.schedule.reference == lr else self.schedule.for_group(lr))
            differs = group.base != lr or (not self.multiples and lr != self.schedule.reference)
            self._host.append(differs)
        self._show()

    def _named(self) -> Any:
        """The scheduler that the config names, with its own groups, at this iteration."""
        if self._twin is None:
            groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in self._lrs]
            self._twin = self._make(torch.optim.Adam(groups))
        return self._twin

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For ``isinstance``, in addition to the type itself."""
        return type(self._named())

    def __getattr__(self, name: str) -> Any:
        """Further attributes of the scheduler that the config names: ``warmup_num_steps``, ``get_lr_ratio``."""
        if name.startswith("_"):
            raise AttributeError(name)
        twin = self._named()
        if hasattr(twin, "last_batch_iteration"):
            twin.last_batch_iteration = self.last_batch_iteration
        return getattr(twin, name)

    @property
    def differs(self) -> bool:
        """Whether the step's own rates are wrong for some group."""
        return any(self._host)

    @property
    def last_batch_iteration(self) -> int:
        """The number of updates, less one."""
        self._settle()
        return self._updates + self._moved - 1

    @property
    def last_epoch(self) -> int:
        """The number of updates, by torch's name."""
        return self.last_batch_iteration + 1

    def get_lr(self) -> list[float]:
        """The rate of each param group in the next update."""
        self._settle()
        return [rates.rate(self._updates + self._moved) for rates in self._own]

    get_last_lr = get_lr

    def step(self, *_: Any, **__: Any) -> None:
        """Advances by one more than the updates do; the engine needs no such call."""
        self._settle()
        self._moved += 1
        self._show()

    def state_dict(self) -> dict[str, Any]:
        """The iteration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from an iteration, independent of the step's count."""
        self._settle()
        self._moved = int(state_dict["last_batch_iteration"]) + 1 - self._updates
        self._show()

    def count(self, updates: int) -> None:
        """Sets the number of updates that the step has made."""
        self._updates = updates
        self._show()

    def _show(self) -> None:
        for group, rates, host in zip(self._groups, self._own, self._host, strict=True):
            group.show(rates.rate(self._updates + self._moved))
            if self._moved or host:
                group.shown = None


def named_scheduler(name: str, given: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A function that makes, for an optimizer, the scheduler that a config names, DeepSpeed's or torch's.

    Args:
        name: its type.
        given: its arguments, as in the config.
    """
    if name not in SCHEDULERS:
        return lambda optimizer: getattr(torch.optim.lr_scheduler, name)(optimizer, **given)
    known = {key.name: key for key in SCHEDULERS[name].keys}
    parsed = {key: known[key].parse(value) for key, value in given.items()}
    make: Callable[..., Any] = SCHEDULERS[name]
    return lambda optimizer: make(optimizer, **parsed)


def cycled_on_host(config: dict[str, Any]) -> Callable[[Any], Any] | None:
    """A function that makes an optimizer's scheduler, if a config's OneCycle cycles betas; else None.

    Betas are host numbers here, so this scheduler steps on the host, after each update.
    """
    block = config.get("scheduler")
    params = block.get("params") if isinstance(block, dict) and block.get("type") == "OneCycle" else None
    if not isinstance(params, dict) or params.get("cycle_momentum", True) is False or not _has_betas(config):
        return None
    if any(name not in params for name in SCHEDULERS["OneCycle"].required) or params.get("last_batch_iteration", -1) != -1:
        return None
    try:
        return named_scheduler("OneCycle", params)
    except (KeyError, ValueError):
        return None  # the plan rejects it


def _has_betas(config: dict[str, Any]) -> bool:
    block = config.get("optimizer")
    rule = rule_of(str(block.get("type"))) if isinstance(block, dict) else None
    return rule is None or rule.betas
