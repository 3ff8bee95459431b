"""Losses that are not finite: counted on the device, judged now and then."""

from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm

__all__ = ["Health", "NonFiniteLossError", "OnNonFinite", "RollBack", "Stop", "Verdict"]


class NonFiniteLossError(FloatingPointError):
    """The loss was not finite for as many steps in a row as ``fit`` was told to bear."""


def _positive(record: Any, field: Any, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{type(record).__name__}({field.name}={value!r}): a number of at least 1 is meant")


@attrs.frozen
class Stop:
    """After so many losses in a row that are not finite, raise NonFiniteLossError."""

    after: int = attrs.field(default=3, validator=_positive)


@attrs.frozen
class RollBack:
    """After so many losses in a row that are not finite, go on from the last checkpoint.

    The data do not go back: batches since that checkpoint are skipped, as the same ones would lead to the same place.

    Attributes:
        after: how many in a row.
        times: how often in all, restarts included; then NonFiniteLossError.
    """

    after: int = attrs.field(default=3, validator=_positive)
    times: int = attrs.field(default=3, validator=_positive)


OnNonFinite = Stop | RollBack | None


@attrs.frozen
class Verdict:
    """What all ranks agree on: losses in a row that are not finite, now and at worst, and whether the params are finite."""

    streak: int = 0
    worst: int = 0
    spoiled: bool = False


@attrs.frozen(eq=False)
class Health:
    """How many losses in a row were not finite, as tensors where the losses are: noting one waits for nothing.

    >>> health = Health()
    >>> for loss in (1.0, float("nan"), float("inf"), 2.0, float("nan")):
    ...     health = health.after(torch.tensor(loss))
    >>> health.verdict()
    Verdict(streak=1, worst=2, spoiled=False)
    """

    streak: Tensor | None = None
    worst: Tensor | None = None

    def after(self, loss: Tensor) -> "Health":
        """With one more loss."""
        loss = loss.detach()
        bad = loss.isfinite().logical_not()
        if self.streak is None or self.worst is None:
            return Health(bad.long(), bad.long())
        streak = torch.where(bad, self.streak + 1, 0)
        return Health(streak, torch.maximum(self.worst, streak))

    def judged(self) -> "Health":
        """The same after a verdict: the worst is behind it."""
        return attrs.evolve(self, worst=self.streak)

    def verdict(self, finite: Tensor | None = None) -> Verdict:
        """The worst over all ranks; reads three numbers and makes one all-reduce of them."""
        if self.streak is None or self.worst is None:
            return Verdict()
        mine = [int(self.streak), int(self.worst), 0 if finite is None else int(not finite)]
        here = comm.world()
        streak, worst, spoiled = comm.all_reduce(torch.tensor(mine, device=here.world.device), op="max").tolist()
        return Verdict(streak, worst, bool(spoiled))
