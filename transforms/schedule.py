"""Learning-rate schedules."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_ds.state import State
from functional_ds.step import Metrics, Step, Transform, wrap
from functional_ds.weighted import Weighted

from .schedules import Factor, check_floor

__all__ = ["schedule", "warmup_cosine"]


def schedule(fn: Callable[[Tensor], float | Tensor]) -> Transform:
    """Multiplies the learning rate by ``fn(updates so far)``; the factor is the metric ``rate``.

    ``fn`` gets an int64 scalar tensor. Written with torch functions, as ``warmup_cosine`` is, it never waits for a GPU.
    Schedules multiply.
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r} must be a function from the number of updates to a factor")

    def rate(inner: Any, step: Step, state: State) -> float | Tensor:
        return inner(step, state) * fn(state.step)  # type: ignore[no-any-return]

    def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        factor = torch.as_tensor(step.rate(state), dtype=torch.float32)
        state, metrics = inner(step, state, grads)
        return state, {**metrics, "rate": factor}

    return wrap(f"schedule({getattr(fn, '__name__', fn)})", rate=rate, update=update)


def warmup_cosine(warmup: int, total: int, floor: float = 0.0) -> Factor:
    """From 0 linearly to 1 over ``warmup`` updates, then along a cosine to ``floor`` at ``total``, and ``floor`` after.

    The first update already moves: update i (from 0) of the warm-up has the factor (i + 1) / warmup.

    Raises:
        ValueError: a number out of range.

    >>> fn = warmup_cosine(2, 6)
    >>> [round(fn(i).item(), 3) for i in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup={warmup} must lie in 0..total={total}")
    check_floor(floor)

    def factor(count: int | Tensor) -> Tensor:
        done = torch.as_tensor(count).to(torch.float32)
        part = ((done - warmup) / max(total - warmup, 1)).clamp(0, 1)
        cosine = floor + (1 - floor) * 0.5 * (1 + torch.cos(math.pi * part))
        return torch.where(done < warmup, (done + 1) / max(warmup, 1), cosine)

    factor.__name__ = f"warmup_cosine({warmup}, {total}, {floor})"
    return factor
