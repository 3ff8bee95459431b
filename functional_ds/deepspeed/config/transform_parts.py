"""The transforms of a plan, in the order in which they are composed, and those that only plans have."""

from collections.abc import Callable
from typing import Any

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.deepspeed.config.model.leaf_modules import leaf_units
from functional_ds.step.compose import compose, wrap
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State, UpdateError
from functional_ds.step.step import Step, Transform
from functional_ds.transforms.accumulate import accumulate
from functional_ds.transforms.clip import clip
from functional_ds.transforms.data_parallel.local_gradients import local_gradients
from functional_ds.transforms.schedule import schedule as scheduled

from .config_reader import Settings
from .ds_optimizers import OptimizerRule
from .ds_transforms import offloading, precision, sharding
from .explain import ConfigError
from .keys.config_key import Fate
from .schedules.lr_scheduler import RateSchedule


def transforms_of(
    s: Settings,
    world_size: int,
    *,
    group: comm.Group | None,
    steps: int,
    rule: OptimizerRule | None,
    model: Any,
    schedule: RateSchedule | None,
) -> Callable[[], Transform]:
    """Composes the transforms, from the storage to the whole step; marks unsupported keys in the settings.

    ``T.offload`` checks its folder when it is made, which is when the result is called.
    """
    units = s.attempt("zero_optimization.leaf_module", lambda: leaf_units(model, s["zero_optimization.leaf_module"]))
    exponent = "fp16.min_loss_scale" if "fp16.min_loss_scale" in s else "fp16.initial_scale_power"
    casts = s.attempt(exponent, lambda: precision(s))
    enabled = [path for path in ("fp16.enabled", "bf16.enabled", "torch_autocast.enabled") if s[path]]
    for path in enabled:
        s.note(path, Fate.BECAME, f"`T.{casts}`.")
    reduces = rule is not None and rule.reduces
    stage = "zero_optimization.stage"
    shards = local_gradients(group) if reduces else s.attempt(stage, lambda: sharding(s, world_size, group, units))
    if shards is not None and stage in s:
        skips = f" `T.{casts}` skips steps whose gradients are not finite, as in DeepSpeed."
        s.note(stage, Fate.BECAME, f"`T.{shards}`.{'' if enabled or casts is None else skips}")
    away, others = offloading(s), _others(s, world_size, steps, reduces)
    stops = s["fp16.enabled"] and not s["fp16.loss_scale"] and s["zero_optimization.stage"] > 0

    def composed() -> Transform:
        offload = None if away is None else build_offload(away)
        rates = None if schedule is None else scheduled(schedule)
        stop = stop_at_minimum() if stops else None
        transforms = (casts, offload, shards, *others, rates, stop, for_ranks(world_size, group))
        return compose(*(transform for transform in transforms if transform is not None))

    return composed


def _others(s: Settings, world_size: int, steps: int, reduces: bool) -> list[Transform]:
    transforms = [accumulate(steps)] if steps > 1 else []
    limit = s["gradient_clipping"]
    if reduces:
        if "gradient_clipping" in s and limit:
            s.refuse("gradient_clipping", "this optimizer never has a whole gradient; set it to 0")
        s.note("gradient_clipping", Fate.IGNORED, "This optimizer never has a whole gradient, so nothing is clipped.")
    elif limit:
        if s["zero_optimization.compute_grad_norm"] is False:
            s.refuse("zero_optimization.compute_grad_norm", "gradient_clipping needs the norm; set it to 0")
        transforms.append(clip(limit))
        words = "" if "gradient_clipping" in s else ": DeepSpeed's default is 1.0"
        s.note("gradient_clipping", Fate.BECAME, f"`T.clip({limit})`{words}.")
    if s["gradient_allreduce_op"] == "sum":
        if s["zero_optimization.stage"] == 3:
            s.refuse("gradient_allreduce_op", "DeepSpeed has sums in stages 0 to 2 alone")
        transforms.append(sum_gradients(world_size))
    return transforms


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


class LossScaleError(UpdateError):
    """A gradient overflowed at the lowest loss scale; the state passed to the step stays valid."""


def for_ranks(ranks: int, group: comm.Group | None) -> Transform:
    """Raises an error, in ``init``, for another number of data-parallel ranks than the batch sizes assume."""

    def init(inner: Any, step: Step, params: Any) -> State:
        there = (group or comm.world()).size
        if there != ranks:
            raise ValueError(
                f"this plan is for {ranks} data-parallel ranks, and there are {there}: pass from_ds_config the number, and "
                "group= where it is not the whole world"
            )
        return inner(step, params)  # type: ignore[no-any-return]

    return wrap(f"for_ranks({ranks})", init=init)


def sum_gradients(ranks: int) -> Transform:
    """Gradients times the number of ranks: the sum of the ranks' means, as with ``gradient_allreduce_op: sum``."""

    def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        return inner(step, state, tree.replace(grads, weight=grads.weight / ranks))  # type: ignore[no-any-return]

    return wrap(f"sum_gradients({ranks})", traits=[Trait.HEEDS_SKIPS], update=update)


def stop_at_minimum() -> Transform:
    """Raises an error if a gradient overflows at the lowest loss scale, as in DeepSpeed; the host waits for each update.

    Raises:
        LossScaleError: in a step, on every rank; the state stays valid.
    """

    def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        scale = state.slots["mixed_precision"].loss_scale
        lowest = (scale.value <= scale.minimum) & (scale.patience <= 1)
        state, metrics = inner(step, state, grads)
        skipped = metrics["skipped"]
        if not skipped.is_meta and (lowest.to(skipped.device) & (skipped > 0)).item():
            raise LossScaleError(
                f"a gradient is not finite, and the loss scale is at its minimum, {scale.minimum}; look for what overflows, "
                "lower fp16.min_loss_scale, or use bf16"
            )
        return state, metrics

    return wrap("stop_at_minimum", traits=[Trait.HEEDS_SKIPS], update=update)
