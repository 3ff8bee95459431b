"""The scheduler of a config as an object beside the engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from functional_ds.deepspeed.config.ds_optimizers import rule_of
from functional_ds.deepspeed.config.ds_schedules import SCHEDULERS, RateSchedule

from .optimizer_groups import LiveGroup

__all__ = ["ConfigScheduler", "cycled_on_host"]


@attrs.define(eq=False)
class ConfigScheduler:
    """The config's schedule with the interface of DeepSpeed's schedulers. The engine moves it after each update.

    The step itself has the schedule, as a function of its count of updates. This object only says what it is, until somebody
    moves it or writes another rate: then that rate holds.

    Attributes:
        schedule: of the plan.
        multiples: whether a group's rates are always the same multiples of its own.
        on_host: whether the step has no schedule, and all rates come from here.
    """

    schedule: RateSchedule
    multiples: bool
    on_host: bool
    _groups: Sequence[LiveGroup] = attrs.field(alias="groups", repr=False)
    _settle: Callable[[], None] = attrs.field(alias="settle", repr=False)
    _updates: int = 0  # of the step
    _moved: int = 0  # how often somebody else called ``step``
    _own: list[RateSchedule] = attrs.field(factory=list, repr=False)  # of each group
    _host: list[bool] = attrs.field(factory=list, repr=False)  # whether the step's own rates are not the right ones for it

    def __attrs_post_init__(self) -> None:
        for group in self._groups:
            lr = float(group.given["lr"])
            self._own.append(self.schedule if group.base == self.schedule.reference == lr else self.schedule.for_group(lr))
            differs = group.base != lr or (not self.multiples and lr != self.schedule.reference)
            self._host.append(self.on_host or differs)
        self._show()

    @property
    def differs(self) -> bool:
        """Whether the step's own rates are not the right ones for all groups."""
        return any(self._host)

    @property
    def last_batch_iteration(self) -> int:
        """How many updates there were, less one."""
        self._settle()
        return self._updates + self._moved - 1

    @property
    def last_epoch(self) -> int:
        """The same by torch's name: how many updates there were."""
        return self.last_batch_iteration + 1

    def get_lr(self) -> list[float]:
        """The rate of each param group in the next update."""
        self._settle()
        return [own.rate(self._updates + self._moved) for own in self._own]

    def get_last_lr(self) -> list[float]:
        """The same."""
        return self.get_lr()

    def step(self, *_: Any, **__: Any) -> None:
        """Moves on by one more than the updates do; the engine needs no such call."""
        self._settle()
        self._moved += 1
        self._show()

    def state_dict(self) -> dict[str, Any]:
        """The iteration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from an iteration, whatever the step's count is."""
        self._settle()
        self._moved = int(state_dict["last_batch_iteration"]) + 1 - self._updates
        self._show()

    def count(self, updates: int) -> None:
        """Says how many updates the step has made."""
        self._updates = updates
        self._show()

    def _show(self) -> None:
        for group, own, host in zip(self._groups, self._own, self._host, strict=True):
            group.show(own.rate(self._updates + self._moved))
            if self._moved or host:
                group.shown = None


def cycled_on_host(config: dict[str, Any]) -> Callable[[Any], Any] | None:
    """What makes the scheduler of an optimizer where a config's OneCycle cycles betas; else None.

    Betas are numbers of the host here, so this scheduler moves there, after each update.
    """
    block = config.get("scheduler")
    params = block.get("params") if isinstance(block, dict) and block.get("type") == "OneCycle" else None
    if not isinstance(params, dict) or params.get("cycle_momentum", True) is False or not _has_betas(config):
        return None
    rule = SCHEDULERS["OneCycle"]
    known = {key.name: key for key in rule.keys}
    try:
        given = {name: known[name].parse(value) for name, value in params.items()}
    except (KeyError, ValueError):
        return None  # the plan refuses it
    if any(name not in given for name in rule.required) or given.get("last_batch_iteration", -1) != -1:
        return None
    from functional_ds.deepspeed.runtime.lr_schedules import OneCycle  # it logs by utils, which import engines

    return lambda optimizer: OneCycle(optimizer, **given)


def _has_betas(config: dict[str, Any]) -> bool:
    block = config.get("optimizer")
    rule = rule_of(str(block.get("type"))) if isinstance(block, dict) else None
    return rule is None or rule.betas
