"""Handling of losses that are not finite: counted on the device, read from time to time."""

from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm


class NonFiniteLossError(FloatingPointError):
    """The loss was not finite for too many steps in a row, by ``on_non_finite``."""


def _positive(record: Any, field: Any, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{type(record).__name__}({field.name}={value!r}): a number of at least 1 is needed")


@attrs.frozen
class Stop:
    """Raises NonFiniteLossError after this many losses in a row that are not finite.

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
    >>> nan = torch.tensor([float("nan")])
    >>> fds.fit(step, step.init({"w": torch.ones(1)}), lambda index: nan, steps=9, on_non_finite=Stop(after=2))
    Traceback (most recent call last):
        ...
    functional_ds.fitting.non_finite.NonFiniteLossError: ...
    """

    after: int = attrs.field(default=3, validator=_positive)


@attrs.frozen
class RollBack:
    """Continues from the last checkpoint after this many losses in a row that are not finite.

    Batches since that checkpoint are skipped, as the same batches would give the same losses.

    Attributes:
        after: the number of losses in a row.
        times: how often in total, restarts included; then NonFiniteLossError is raised.

    >>> RollBack(after=2, times=1)
    RollBack(after=2, times=1)
    """

    after: int = attrs.field(default=3, validator=_positive)
    times: int = attrs.field(default=3, validator=_positive)


OnNonFinite = Stop | RollBack | None


@attrs.frozen
class Verdict:
    """What all ranks agree on.

    Attributes:
        streak: the current number of losses in a row that are not finite.
        worst: the longest such run since the last verdict.
        spoiled: whether a param is not finite.
    """

    streak: int = 0
    worst: int = 0
    spoiled: bool = False


@attrs.frozen(eq=False)
class Health:
    """Counts losses in a row that are not finite, in tensors on the losses' device, so counting does not wait.

    >>> health = Health()
    >>> for loss in (1.0, float("nan"), float("inf"), 2.0, float("nan")):
    ...     health = health.after(torch.tensor(loss))
    >>> health.verdict()
    Verdict(streak=1, worst=2, spoiled=False)
    """

    streak: Tensor | None = None
    worst: Tensor | None = None

    def after(self, loss: Tensor) -> "Health":
        """The count with one more loss."""
        loss = loss.detach()
        bad = loss.isfinite().logical_not()
        if self.streak is None or self.worst is None:
            return Health(bad.long(), bad.long())
        streak = torch.where(bad, self.streak + 1, 0)
        return Health(streak, torch.maximum(self.worst, streak))

    def judged(self) -> "Health":
        """The count after a verdict, from which ``worst`` starts again."""
        return attrs.evolve(self, worst=self.streak)

    def verdict(self, finite: Tensor | None = None) -> Verdict:
        """The largest counts of all ranks. Reads three numbers from the device; one all-reduce."""
        if self.streak is None or self.worst is None:
            return Verdict()
        streak, worst, spoiled = agreed(self.streak, self.worst, finite is not None and not finite)
        return Verdict(streak, worst, bool(spoiled))


def agreed(*mine: int | Tensor) -> list[int]:
    """The elementwise maximum of all ranks' numbers."""
    numbers = torch.tensor([int(x) for x in mine], device=comm.world().world.device)
    return comm.all_reduce(numbers, op="max").tolist()
