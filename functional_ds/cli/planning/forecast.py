"""What a candidate will hold, send and take on a machine, and whether it fits."""

from typing import Any

import attrs

from functional_ds.memory.account import KINDS
from functional_ds.scaling.machine import Machine

from .candidate import Candidate
from .subject import Subject
from .values_free_step import StepShape, step_shape

__all__ = ["Forecast", "forecast"]


@attrs.frozen
class Forecast:
    """A candidate's prediction.

    Attributes:
        candidate: the strategy.
        shape: what its step is like.
        machine: where it would run; None where nobody said.
        limit: bytes of a rank; 0 for none.
    """

    candidate: Candidate
    shape: StepShape
    machine: Machine | None = None
    limit: int = 0

    @property
    def peak(self) -> int:
        """The most bytes at one time."""
        return self.shape.peak

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return not self.limit or self.peak <= self.limit

    @property
    def why_not(self) -> str:
        """What is too much, and by how much; empty where it fits."""
        if self.fits:
            return ""
        kinds = {kind: getattr(self.shape.memory, kind) for kind in KINDS} | {"activations": self.shape.activations}
        largest = max(kinds, key=lambda kind: kinds[kind])
        state = self.shape.memory.state
        held = "the state alone does" if state > self.limit else f"{largest} are the largest part"
        return (
            f"{self.peak - self.limit:,} bytes over the limit of {self.limit:,}: {held} ({kinds[largest]:,} bytes of {largest})"
        )

    @property
    def perfect_seconds(self) -> dict[str, float] | None:
        """What a fit of the machine's factors starts from. None without a machine or a loss."""
        if self.machine is None or not self.shape.work:
            return None
        return self.machine.perfect_seconds(self.shape.work, self.shape.sent)

    @property
    def seconds(self) -> dict[str, float] | None:
        """Of a step, by what it is spent on; communication overlaps nothing. None without a machine or a loss."""
        perfect = self.perfect_seconds
        return None if self.machine is None or perfect is None else self.machine.scaled(perfect)

    @property
    def step_seconds(self) -> float | None:
        """Of a whole step."""
        return None if self.seconds is None else sum(self.seconds.values())

    @property
    def samples_per_second(self) -> float | None:
        """Rows of all ranks."""
        return None if not self.step_seconds else self.candidate.plan.batch.train_batch_size / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON: sizes in bytes, times in seconds."""
        memory = self.shape.memory
        return {
            **self.candidate.as_dict(),
            "memory": {
                **{kind: getattr(memory, kind) for kind in KINDS if kind != "activations"},
                "activations": self.shape.activations if self.shape.complete else None,
                "state": memory.state,
                "peak": self.peak,
            },
            "peak_has_activations": self.shape.complete,
            "limit": self.limit or None,
            "fits": self.fits,
            "why_not": self.why_not or None,
            "sent": [
                {"collective": row.collective, "group": row.group, "ranks": row.size, "calls": row.calls, "bytes": row.bytes}
                for row in self.shape.sent
            ],
            "flops": self.shape.flops or None,
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "line": self.candidate.line(),
        }


def forecast(subject: Subject, candidate: Candidate, *, machine: Machine | None, limit: int, device: str = "cpu") -> Forecast:
    """Predicts a candidate.

    Args:
        subject: the model.
        candidate: the strategy.
        machine: for times.
        limit: bytes of a rank; 0 for the machine's own, if it says.
        device: the kind of device, where there is no machine.

    Raises:
        CommandError: the strategy is refused, or the model's loss needs values.
    """
    kind = machine.device if machine is not None else device
    shape = step_shape(subject, candidate, device=kind)
    return Forecast(candidate, shape, machine, limit or (machine.memory if machine is not None else 0))
