"""The transforms of a plan, in the order in which they are composed."""

from typing import Any

import attrs

from functional_ds import comm
from functional_ds.deepspeed.config.model.leaf_modules import leaf_units
from functional_ds.sharding.grouping import UnitOf
from functional_ds.step.compose import compose
from functional_ds.step.step import Transform
from functional_ds.transforms.accumulate import accumulate
from functional_ds.transforms.clip import clip
from functional_ds.transforms.local_gradients import local_gradients
from functional_ds.transforms.schedule import schedule as scheduled

from .config_reader import Settings
from .ds_optimizers import OptimizerRule
from .ds_transforms import offloading, precision, sharding
from .explain import ConfigError
from .extra_transforms import for_ranks, stop_at_minimum, sum_gradients
from .keys.config_key import Fate
from .schedules.lr_scheduler import RateSchedule

__all__ = ["TransformParts", "transforms_of"]


@attrs.frozen(eq=False)
class TransformParts:
    """What is composed, from the storage to the whole step.

    Attributes:
        precision: mixed precision, or the check of gradients; None for neither.
        offload: arguments of ``T.offload``, which looks for its folder when it is called; None for none.
        sharding: ZeRO, or local gradients.
        others: accumulation, clipping and the like.
        schedule: the rates.
        stops: whether an overflow at the lowest loss scale ends the run.
        last: what checks the number of ranks.
    """

    precision: Transform | None
    offload: dict[str, Any] | None
    sharding: Transform | None
    others: tuple[Transform, ...]
    stops: bool
    last: Transform
    schedule: RateSchedule | None = None

    def composed(self) -> Transform:
        """All of them."""
        away = None if self.offload is None else build_offload(self.offload)
        rates = None if self.schedule is None else scheduled(self.schedule)
        stop = stop_at_minimum() if self.stops else None
        found = (self.precision, away, self.sharding, *self.others, rates, stop, self.last)
        return compose(*(each for each in found if each is not None))


def transforms_of(
    s: Settings, world_size: int, *, group: comm.Group | None, steps: int, rule: OptimizerRule | None, model: Any
) -> TransformParts:
    """The transforms; what cannot be made is refused in the settings."""
    units = None
    try:
        units = leaf_units(model, s["zero_optimization.leaf_module"])
    except ValueError as error:
        s.refuse("zero_optimization.leaf_module", str(error))
    try:
        casts = precision(s)
    except ValueError as error:
        s.refuse("fp16.min_loss_scale" if "fp16.min_loss_scale" in s else "fp16.initial_scale_power", str(error))
        casts = None
    enabled = [path for path in ("fp16.enabled", "bf16.enabled", "torch_autocast.enabled") if s[path]]
    for path in enabled:
        s.note(path, Fate.BECAME, f"`T.{casts}`.")
    reduces = rule is not None and rule.reduces
    shards = local_gradients(group) if reduces else _sharding(s, world_size, group, units)
    if shards is not None and "zero_optimization.stage" in s:
        checks = "" if enabled or casts is None else f" `T.{casts}` leaves out steps whose gradients are not finite, as there."
        s.note("zero_optimization.stage", Fate.BECAME, f"`T.{shards}`.{checks}")
    last = for_ranks(world_size, group)
    dynamic = s["fp16.enabled"] and not s["fp16.loss_scale"] and s["zero_optimization.stage"] > 0
    return TransformParts(casts, offloading(s), shards, tuple(_others(s, world_size, steps, reduces)), bool(dynamic), last)


def _sharding(s: Settings, world_size: int, group: comm.Group | None, units: UnitOf | None) -> Transform | None:
    try:
        return sharding(s, world_size, group, units)
    except ValueError as error:
        s.refuse("zero_optimization.stage", str(error))
        return None


def _others(s: Settings, world_size: int, steps: int, reduces: bool) -> list[Transform]:
    found = [accumulate(steps)] if steps > 1 else []
    limit = s["gradient_clipping"]
    if reduces:
        if "gradient_clipping" in s and limit:
            s.refuse("gradient_clipping", "this optimizer never has a whole gradient; set it to 0")
        s.note("gradient_clipping", Fate.IGNORED, "This optimizer never has a whole gradient, so nothing is clipped.")
    elif limit:
        if s["zero_optimization.compute_grad_norm"] is False:
            s.refuse("zero_optimization.compute_grad_norm", "gradient_clipping needs the norm; set it to 0")
        found.append(clip(limit))
        words = "" if "gradient_clipping" in s else ": DeepSpeed's default is 1.0"
        s.note("gradient_clipping", Fate.BECAME, f"`T.clip({limit})`{words}.")
    if s["gradient_allreduce_op"] == "sum":
        if s["zero_optimization.stage"] == 3:
            s.refuse("gradient_allreduce_op", "DeepSpeed has sums in stages 0 to 2 alone")
        found.append(sum_gradients(world_size))
    return found


def build_offload(options: dict[str, Any]) -> Transform:
    """The transform.

    Raises:
        ConfigError: its folder is not there.
    """
    from functional_ds.transforms.offload import offload  # may be left out of an installation

    try:
        return offload(**options)
    except ValueError as error:
        raise ConfigError(f"zero_optimization.offload_optimizer: {error}") from None
