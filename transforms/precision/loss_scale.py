"""Loss scaling, so that fp16 gradients do not underflow."""

import math
from typing import Any, Protocol, TypeVar

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

S = TypeVar("S")


class LossScale(Protocol):
    """A pytree with the current scale; no method waits for the device.

    For a power of two ``unscale(Weighted(scale(x), w)).mean() = x / w``, bitwise, unless something overflows or
    underflows.
    """

    @property
    def now(self) -> float | Tensor:
        """The factor of the loss."""
        ...

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        ...

    def unscale(self, scaled: Weighted) -> Weighted:
        """The same mean as before scaling: multiplies the weight and leaves the sum."""
        ...

    def adjust(self: S, finite: Tensor) -> S:
        """The scale for the next step; ``finite``, a bool scalar, tells whether this step's gradients were."""
        ...


class _Scaling:
    """What all loss scales share."""

    now: Any

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return loss * self.now  # type: ignore[no-any-return]

    def unscale(self, scaled: Weighted) -> Weighted:
        """The same sum with its weight multiplied."""
        return tree.replace(scaled, weight=scaled.weight * self.now)

    def adjust(self: S, finite: Tensor) -> S:
        """The same scale."""
        return self


@tree.record
class NoScale(_Scaling):
    """No loss scaling and no overflow check.

    >>> NoScale().scale(torch.tensor(2.0))
    tensor(2.)
    """

    now = 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss itself."""
        return loss

    def unscale(self, scaled: Weighted) -> Weighted:
        """The same value."""
        return scaled


@tree.record
class StaticScale(_Scaling):
    """A constant loss scale; steps that overflow are skipped.

    Raises:
        ValueError: the value is not positive, or infinite.

    >>> StaticScale(1024.0).scale(torch.tensor(2.0))
    tensor(2048.)
    """

    value: float = tree.static()

    def __attrs_post_init__(self) -> None:
        _positive(StaticScale, value=self.value)
        _finite(StaticScale, value=self.value)

    @property
    def now(self) -> float:
        """The value."""
        return self.value


@tree.record
class DynamicScale(_Scaling):
    """A loss scale that shrinks on overflow and grows after a number of steps without one.

    ```
    overflow:   patience > 1:  patience ← patience - 1
                else:          scale ← max(scale / factor, minimum)
                run ← -settle
    else:       run ← run + 1
                run = window:  scale ← min(scale · factor, maximum);  run ← 0;  patience ← hysteresis
                consecutive:   patience ← hysteresis
    ```

    The scale first shrinks at the ``hysteresis``-th overflow, and then at each one until patience is restored: by the next
    growth, or, with ``consecutive``, by any step without overflow. With ``settle=1`` these are the rules and defaults of
    DeepSpeed's fp16 settings, except ``maximum``, which DeepSpeed does not have.

    Attributes:
        initial: the first scale.
        window: steps in a row without overflow after which the scale grows.
        factor: by how much it grows and shrinks.
        hysteresis: how many overflows it takes to shrink.
        consecutive: whether these must follow each other.
        settle: steps without overflow, at the start and after each overflow, that do not count; DeepSpeed has one.
        minimum: the lower limit; a loss that sums over many tokens may need less than one.
        maximum: the upper limit; from about 2^60 on, fp32 norms of scaled gradients overflow.
        value: the current scale, an fp32 scalar.
        run: steps since the last overflow or growth, less those that settle, int32.
        patience: overflows until it shrinks, int32.

    Raises:
        ValueError: a number out of range.

    >>> scale = DynamicScale(8.0, window=2, hysteresis=1)
    >>> for finite in (True, True, False):
    ...     scale = scale.adjust(torch.tensor(finite))
    ...     print(scale.value.item())
    8.0
    16.0
    8.0
    """

    initial: float = tree.static(default=2.0**16)
    window: int = tree.static(default=1000)
    factor: float = tree.static(default=2.0)
    hysteresis: int = tree.static(default=2)
    consecutive: bool = tree.static(default=False)
    minimum: float = tree.static(default=1.0)
    maximum: float = tree.static(default=2.0**32)
    settle: int = tree.static(default=0)
    value: Tensor = attrs.field(
        default=attrs.Factory(lambda self: torch.tensor(float(self.initial)), takes_self=True), repr=False
    )
    run: Tensor = attrs.field(
        default=attrs.Factory(lambda self: torch.tensor(-self.settle, dtype=torch.int32), takes_self=True), repr=False
    )
    patience: Tensor = attrs.field(
        default=attrs.Factory(lambda self: torch.tensor(self.hysteresis, dtype=torch.int32), takes_self=True), repr=False
    )

    def __attrs_post_init__(self) -> None:
        _positive(DynamicScale, window=self.window, hysteresis=self.hysteresis, minimum=self.minimum)
        _finite(DynamicScale, initial=self.initial, factor=self.factor, maximum=self.maximum)
        for name in ("window", "hysteresis", "settle"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"DynamicScale: {name}={getattr(self, name)!r} counts steps: it must be a whole number")
        if self.settle < 0:
            raise ValueError(f"DynamicScale: settle={self.settle} must not be negative")
        if not self.factor > 1:
            raise ValueError(f"DynamicScale: factor={self.factor} must be more than 1")
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(f"DynamicScale: initial={self.initial} must be in {self.minimum}..{self.maximum}")

    @property
    def now(self) -> Tensor:
        """The scale now."""
        return self.value

    def adjust(self, finite: Tensor) -> "DynamicScale":
        """The scale after a step."""
        run = torch.where(finite, self.run + 1, -self.settle)
        grows = run == self.window
        shrinks = ~finite & (self.patience <= 1)
        value = torch.where(grows, (self.value * self.factor).clamp(max=self.maximum), self.value)
        value = torch.where(shrinks, (self.value / self.factor).clamp(min=self.minimum), value)
        restored = finite if self.consecutive else grows
        patience = torch.where(finite, self.patience, (self.patience - 1).clamp(min=1))
        patience = torch.where(restored, self.hysteresis, patience)
        return tree.replace(self, value=value, run=torch.where(grows, 0, run), patience=patience)


def _positive(scale: type, **numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{scale.__name__}: {name}={number} must be positive")


def _finite(scale: type, **numbers: float) -> None:
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{scale.__name__}: {name}={number} must be finite")
