"""Further transforms: sums of gradients, an error at the lowest loss scale, a check of the number of ranks."""

from typing import Any

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State, UpdateError
from functional_ds.step.step import Step, Transform

__all__ = ["LossScaleError", "for_ranks", "stop_at_minimum", "sum_gradients"]


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
