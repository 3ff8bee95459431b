"""Learning-rate schedules: pure functions from the number of updates to a factor.

``T.schedule(fn)`` multiplies the optimizer's learning rate by the factor. In the formulas u = updates so far + 1 is the number
of the coming update. The shapes are those of DeepSpeed's schedulers of the same names, as multiples of the optimizer's rate.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform
from functional_ds.step.train_step import takes

Factor = Callable[..., Tensor]


def warmup(steps: int, *, floor: float = 0.0, shape: Literal["linear", "log"] = "linear") -> Factor:
    """Rises from ``floor`` to 1 over ``steps`` updates, then stays at 1.

    ``floor + (1 - floor) · min(1, u / steps)``, or with ``shape="log"`` ``floor + (1 - floor) · min(1, ln u / ln steps)``.

    Args:
        steps: the length of the warmup, in updates.
        floor: the initial factor, in 0..1.
        shape: "linear" or "log".

    Raises:
        ValueError: a number out of range, or an unknown shape.

    >>> [round(warmup(4)(i).item(), 2) for i in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    >>> [round(warmup(4, shape="log")(i).item(), 2) for i in range(5)]
    [0.0, 0.5, 0.79, 1.0, 1.0]
    """
    check_floor(floor)
    if steps < 0:
        raise ValueError(f"steps={steps} must not be negative")
    if shape not in ("linear", "log"):
        raise ValueError(f"shape={shape!r} is unknown; use 'linear' or 'log'")

    def part(u: Tensor) -> Tensor:
        if shape == "linear":
            return (u / max(steps, 1)).clamp(max=1)
        return (u.log() / math.log(steps)).clamp(max=1) if steps > 1 else torch.ones_like(u)

    return _named(f"warmup({steps}, floor={floor}, shape={shape!r})", lambda u: floor + (1 - floor) * part(u))


def warmup_decay(steps: int, total: int, *, floor: float = 0.0, shape: Literal["linear", "log"] = "linear") -> Factor:
    """``warmup(steps)``, then a linear decay to ``floor``, which is reached in the update after ``total``.

    ``floor + (1 - floor) · min(warmup, max(0, (total - u + 1) / (total - steps)))``.

    Args:
        steps: the length of the warmup, in updates.
        total: the last update before the floor.
        floor: the lowest factor, in 0..1.
        shape: of the warmup: "linear" or "log".

    Raises:
        ValueError: a number out of range, or an unknown shape.

    >>> [round(warmup_decay(2, 6)(i).item(), 2) for i in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    up = _warmup_within(total, steps, floor, shape)

    def factor(u: Tensor) -> Tensor:
        down = ((total - u + 1) / max(total - steps, 1)).clamp(min=0)
        return floor + (1 - floor) * torch.minimum(up(u - 1, u.dtype), down)

    return _named(f"warmup_decay({steps}, {total}, floor={floor}, shape={shape!r})", factor)


def one_cycle(up: int, down: int | None = None, *, floor: float = 0.1, decay: float = 0.0, decay_steps: int = 1) -> Factor:
    """Rises from ``floor`` to 1 over ``up`` updates, falls over ``down`` (None: as many), then decays further (Smith 2018).

    ```
    u <= up:          floor + (1 - floor) · u / up
    u <= up + down:   floor + (1 - floor) · (up + down - u) / down
    after that:       floor / (1 + decay · (u - up - down) / decay_steps)
    ```

    Momentum does not cycle.

    Args:
        up: updates from ``floor`` to 1.
        down: updates from 1 to ``floor``.
        floor: the factor before and after the cycle, in 0..1.
        decay: the rate of the decay after the cycle; 0 for none.
        decay_steps: updates per unit of ``decay``.

    Raises:
        ValueError: a number out of range.

    >>> [round(one_cycle(2, floor=0.5, decay=1.0)(i).item(), 3) for i in range(6)]
    [0.75, 1.0, 0.75, 0.5, 0.25, 0.167]
    """
    fall = up if down is None else down
    check_floor(floor)
    if up < 1 or fall < 1 or decay_steps < 1:
        raise ValueError(f"up={up}, down={fall} and decay_steps={decay_steps} must be at least 1")
    if not decay >= 0:
        raise ValueError(f"decay={decay} must not be negative")

    def factor(u: Tensor) -> Tensor:
        cycle = floor + (1 - floor) * torch.minimum(u / up, (up + fall - u) / fall)
        after = floor / (1 + decay * (u - up - fall).clamp(min=0) / decay_steps)
        return torch.where(u <= up + fall, cycle, after)

    return _named(f"one_cycle({up}, {fall}, floor={floor}, decay={decay}, decay_steps={decay_steps})", factor)


def range_test(steps: int, *, rate: float = 1.0, staircase: bool = False) -> Factor:
    """Learning-rate range test (Smith 2017): the factor grows as ``1 + rate · u / steps``.

    ``staircase`` takes the integer part of ``u / steps``.

    Args:
        steps: updates per interval.
        rate: what each interval adds to the factor.
        staircase: whether the factor rises once an interval.

    Raises:
        ValueError: a number out of range.

    >>> [range_test(2)(i).item() for i in range(4)], [range_test(2, staircase=True)(i).item() for i in range(4)]
    ([1.5, 2.0, 2.5, 3.0], [1.0, 2.0, 2.0, 3.0])
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    if not rate >= 0:
        raise ValueError(f"rate={rate} must not be negative")

    def factor(u: Tensor) -> Tensor:
        interval = u / steps
        return 1 + rate * (interval.floor() if staircase else interval)

    return _named(f"range_test({steps}, rate={rate}, staircase={staircase})", factor)


def _warmup_within(total: int, steps: int, floor: float, shape: Literal["linear", "log"]) -> Factor:
    """The warmup of a schedule of so many updates that falls to ``floor``."""
    check_floor(floor)
    if not 0 <= steps <= total:
        raise ValueError(f"steps={steps} must be in 0..total={total}")
    return warmup(steps, shape=shape)


def check_floor(floor: float) -> None:
    """Raises an error for a floor outside 0..1."""
    if not 0 <= floor <= 1:
        raise ValueError(f"floor={floor} must be in 0..1")


def _named(name: str, factor: Callable[[Tensor], Tensor]) -> Factor:
    """As a function of the updates so far, with a name to print."""

    def of(count: int | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return factor(torch.as_tensor(count).to(dtype) + 1)

    of.__name__ = name
    return of


def _rate_dtype(step: Step, state: State) -> torch.dtype:
    """fp64 if any trained leaf is fp64, also where ``state`` has only some of the leaves; else fp32."""
    dtypes = {leaf.dtype for leaf in step.leaf_map(state).leaves} | {leaf.dtype for leaf in tree.leaves(state.params)}
    return torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32


def schedule(fn: Callable[..., float | Tensor]) -> Transform:
    """Multiplies the learning rate by ``fn(updates so far)``; the metric ``rate`` is the product of all such factors.

    ``fn`` gets an int64 scalar tensor; with torch functions, as in ``warmup_cosine``, it does not synchronise with the GPU. A
    parameter ``dtype`` receives the dtype to compute in: fp64 where params are fp64, else fp32. Without one, torch computes
    with the count in fp32, also for fp64 params. Several schedules multiply.

    Raises:
        TypeError: ``fn`` is not callable, or is one of torch's ``LRScheduler`` objects.

    >>> import functional_ds as fds
    >>> step = schedule(lambda count: 0.5**count)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
    >>> state = step.init({"w": torch.zeros(1)})
    >>> for _ in range(2):
    ...     state, metrics = step(state, torch.ones(1))
    >>> step.params(state)["w"].item(), metrics["rate"].item()
    (-1.5, 0.5)
    """
    if isinstance(fn, LRScheduler):
        raise TypeError(
            f"fn={type(fn).__name__}(...) sets the learning rate of a torch optimizer; pass a function from the number of "
            "updates to a factor, such as T.warmup_cosine(steps, total), or the one that LambdaLR was given"
        )
    if not callable(fn):
        raise TypeError(f"fn={fn!r} must be a function from the number of updates to a factor")
    takes_dtype = takes(fn, "dtype")

    def rate(inner: Any, step: Step, state: State) -> float | Tensor:
        further = {"dtype": _rate_dtype(step, state)} if takes_dtype else {}
        return inner(step, state) * fn(state.step, **further)  # type: ignore[no-any-return]

    def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        value = step.rate(state)
        factor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=_rate_dtype(step, state))
        state, metrics = inner(step, state, grads)
        return state, {**metrics, "rate": factor}

    name = f"schedule({getattr(fn, '__name__', fn)})"
    return wrap(name, traits=[Trait.HEEDS_SKIPS], options={"fn": fn}, rate=rate, update=update)


def warmup_cosine(steps: int, total: int, *, floor: float = 0.0, shape: Literal["linear", "log"] = "linear") -> Factor:
    """``warmup(steps)``, then a cosine to ``floor``, which is reached at ``total`` and stays.

    Update i (from 0) of a linear warmup has the factor (i + 1) / steps, so the first update already moves.

    Args:
        steps: the length of the warmup, in updates.
        total: the update at which the factor reaches ``floor``.
        floor: the lowest factor after the warmup, in 0..1.
        shape: of the warmup: "linear" or "log".

    Raises:
        ValueError: a number out of range, or an unknown shape.

    >>> fn = warmup_cosine(2, 6)
    >>> [round(fn(i).item(), 3) for i in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    up = _warmup_within(total, steps, floor, shape)

    def factor(count: int | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        done = torch.as_tensor(count).to(dtype)
        part = ((done - steps) / max(total - steps, 1)).clamp(0, 1)
        cosine = floor + (1 - floor) * 0.5 * (1 + torch.cos(math.pi * part))
        return torch.where(done < steps, up(count, dtype), cosine)

    factor.__name__ = f"warmup_cosine({steps}, {total}, floor={floor}, shape={shape!r})"
    return factor
