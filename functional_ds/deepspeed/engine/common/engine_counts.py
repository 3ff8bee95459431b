"""How many steps an engine has made, and how many were skipped."""

import warnings
from collections.abc import Mapping
from typing import Any

import attrs

from functional_ds.deepspeed.engine.loop.config_questions import ConfigQuestions
from functional_ds.step.phase_signatures import Metrics

from .config_scheduler import ConfigScheduler


@attrs.define(eq=False)
class EngineCounts:
    """DeepSpeed's counts. Whether an update was skipped is read from the device on demand.

    Attributes:
        global_steps: boundaries, including those whose update was skipped.
        global_samples: their rows.
        micro_steps: calls of ``step``.
        skipped_steps: updates that were skipped, as far as known.
        at_boundary: whether the last ``step`` was at a boundary.
        overflow: whether the last update was skipped, as far as known.
        updates: of the step.
        scheduler: is stepped with each update.
        managed: whether the engine counts micro-batches.
        backwards: calls of ``backward`` since the last boundary.
        micro_rows: of a micro-batch, if they were changed.
    """

    micro_batches: int
    managed: bool = True
    scheduler: Any = None
    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
    at_boundary: bool = False
    overflow: bool = False
    updates: int = 0
    backwards: int = 0
    micro_rows: int | None = None
    _open: list[Any] = attrs.field(factory=list)  # tells of each update whether it was skipped
    _stepped: bool = False

    def updated(self, metrics: Metrics, rows: int, lr_kwargs: Mapping[str, Any] | None) -> None:
        """Counts a boundary."""
        self._open.append(metrics.get("skipped"))
        self.at_boundary = True
        self.global_steps += 1
        self.global_samples += rows if self.managed else rows // self.micro_batches * self.backwards
        self.backwards = 0
        scheduler = self.scheduler
        if scheduler is not None and (not isinstance(scheduler, ConfigScheduler) or scheduler.differs):
            self.settle(lr_kwargs)

    def settle(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Reads which updates so far were skipped, and steps the scheduler by the others."""
        if not self._open:
            return
        skipped = [skip is not None and bool(skip > 0) for skip in self._open]
        self._open = []
        self.skipped_steps += sum(skipped)
        made = len(skipped) - sum(skipped)
        self.updates += made
        self.overflow = skipped[-1]
        scheduler = self.scheduler
        if made and isinstance(scheduler, ConfigScheduler):
            scheduler.count(self.updates)
        elif scheduler is not None:
            for _ in range(made):
                self.move(scheduler, lr_kwargs)

    def restart(self, numbers: Mapping[str, int]) -> None:
        """Continues from the counts of a checkpoint. As in DeepSpeed, ``micro_steps`` stay, back to the last boundary."""
        self._open, self.overflow = [], False
        self.micro_steps -= self.micro_steps % self.micro_batches
        self.backwards = 0
        for name, value in numbers.items():
            if name != "micro_steps":
                setattr(self, name, value)
        if isinstance(self.scheduler, ConfigScheduler):
            self.scheduler.count(self.updates)

    def move(self, scheduler: Any, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Steps the scheduler, after an update."""
        with warnings.catch_warnings():
            if not self._stepped:  # torch's schedulers look for calls of optimizer.step(), which is the engine's here
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            scheduler.step(**(lr_kwargs or {}))
        self._stepped = True


class CountedEngine(ConfigQuestions):
    """An engine's counts and batch sizes, by DeepSpeed's names."""

    _counts: EngineCounts

    def train_batch_size(self) -> int:
        """Rows of an update, on all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows of a micro-batch, on one rank."""
        return self._counts.micro_rows or self.plan.batch.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an update."""
        return self._counts.micro_batches

    @property
    def global_steps(self) -> int:
        """The number of boundaries, including those whose update was skipped."""
        return self._counts.global_steps

    @property
    def global_samples(self) -> int:
        """The number of their rows, on all ranks."""
        return self._counts.global_samples

    @property
    def skipped_steps(self) -> int:
        """The number of updates skipped because gradients were not finite. Reading it waits for the device."""
        self._counts.settle()
        return self._counts.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last step has changed params. Reading it waits for the device."""
        self._counts.settle()
        return self._counts.at_boundary and not self._counts.overflow
