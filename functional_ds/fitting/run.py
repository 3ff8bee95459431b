"""One run of ``fit``: its steps, and the work between them."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.device import forked_rng
from functional_ds.base.marks import is_trainable
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .checkpoints import CheckpointManager, Progress
from .checks import positive_steps
from .data import BatchReader, BatchSource
from .heartbeat import Watch
from .loggers import MetricLogger
from .non_finite import Health, NonFiniteLossError, OnNonFinite, RollBack, Verdict, agreed
from .positions import local_position, restore_generators
from .signals import Flag

_SIGINT = 2  # for a flag that does not say which signal set it


class Interrupted(SystemExit):
    """The run ended on a signal, after its checkpoint was written.

    Attributes:
        done: the number of steps made.
        state: after these steps; None if the exception came from another process.
    """

    def __init__(self, number: int, done: int, state: State | None = None) -> None:
        super().__init__(128 + number)
        self.number, self.done, self.state = number, done, state

    def __reduce__(self) -> tuple[Any, ...]:
        return Interrupted, (self.number, self.done)

    def __str__(self) -> str:
        return f"interrupted by signal {self.number} after step {self.done}"


@attrs.frozen
class Evaluation:
    """What ``fit`` computes before the first step, after each ``every`` steps, and after the last.

    Attributes:
        function: from a state to numbers, which are logged. All ranks call it; it must not make steps.
        every: the number of steps; None for only the first and the last.

    >>> evaluation = Evaluation(lambda state: {"updates": int(state.step)}, every=10)
    >>> evaluation.due(20), evaluation.due(25)
    (True, False)
    """

    function: Callable[[State], Mapping[str, Any]]
    every: int | None = attrs.field(default=None, kw_only=True, validator=positive_steps)

    def due(self, done: int) -> bool:
        """Whether to evaluate after this many steps."""
        return self.every is not None and done % self.every == 0


@attrs.define(eq=False)
class TrainingRun:
    """A run in progress. Every rank has one, and all make the same decisions.

    Attributes:
        step: the training step.
        state: the current state.
        steps: the total number of steps; None for as long as there are batches.
        evaluation: what is computed from time to time.
        on_non_finite: what to do about losses that are not finite.
        source: the batches.
        checkpoints: saves and loads.
        metrics: logs.
        watch: tells the watchdog what this rank is doing.
        flag: asks the run to end.
        progress: the number of steps made, and what belongs to it.
        health: which losses were not finite.
        evaluated: the number of steps at the last evaluation.
    """

    step: Step
    state: State = attrs.field(repr=False)
    steps: int | None = attrs.field(kw_only=True)
    evaluation: Evaluation | None = attrs.field(kw_only=True)
    on_non_finite: OnNonFinite = attrs.field(kw_only=True)
    source: BatchSource = attrs.field(kw_only=True)
    checkpoints: CheckpointManager = attrs.field(kw_only=True)
    metrics: MetricLogger = attrs.field(kw_only=True)
    watch: Watch = attrs.field(kw_only=True)
    flag: Flag = attrs.field(kw_only=True)
    progress: Progress = attrs.field(factory=Progress, kw_only=True)
    health: Health = attrs.field(factory=Health, kw_only=True)
    evaluated: int | None = attrs.field(default=None, kw_only=True)

    @property
    def done(self) -> int:
        """The number of steps made."""
        return self.progress.done

    def resume(self) -> None:
        """Continues from the newest checkpoint, if there is one."""
        self.state, self.progress = self.checkpoints.newest(self.state, donate=True) or (self.state, self.progress)

    def go(self) -> State:
        """Makes the remaining steps, and returns the state."""
        self.watch.at(self.done, "finding the next batch")
        reader = self.source.at(None if self.progress.data is None else local_position(self.progress.data))
        restore_generators(self.progress.generators)  # replaying batches may have used the generators
        self.metrics.begin(self.done)
        began = self.done
        if began == 0:
            if isinstance(self.on_non_finite, RollBack):
                self._save(reader)
            self._evaluate()
        while self.steps is None or self.done < self.steps:
            batch = self._draw(reader)
            if batch is None:
                break
            self._end_step(reader, self._move(batch[0]))
        if self.done > began:
            self._evaluate()
        self._save(reader)
        self.watch.at(self.done, "waiting for the checkpoint to be written")
        self.checkpoints.wait()
        return self.state

    # -- a step --------------------------------------------------------------------------------------------------------

    def _draw(self, reader: BatchReader) -> tuple[Any] | None:
        """The next batch; None if a rank has none left and the number of steps is open."""
        self.watch.at(self.done + 1, "drawing a batch")
        batch: tuple[Any] | None
        try:
            batch = (next(reader),)
        except StopIteration:
            batch = None
        if self.steps is None:
            return None if agreed(batch is None)[0] else batch
        if batch is None:
            raise ValueError(
                f"batches: rank {comm.world().rank} has none for step {self.done + 1} of steps={self.steps}; "
                "pass fewer steps, steps=None to end where the batches do, or fitting.Epochs(batches) to go over them again"
            )
        return batch

    def _move(self, batch: Any) -> Metrics:
        self.watch.at(self.done + 1, "in the step")
        step = self.metrics.measured or self.step
        self.state, metrics = step(self.state, batch)
        self.progress = attrs.evolve(self.progress, done=self.done + 1)
        if self.on_non_finite is not None:
            if "loss" not in metrics:
                raise ValueError(
                    f"on_non_finite={self.on_non_finite!r} watches the metric 'loss', and the step has {sorted(metrics)}; pass "
                    "on_non_finite=None"
                )
            self.health = self.health.after(metrics["loss"])
        self.metrics.moved()
        return metrics

    def _end_step(self, reader: BatchReader, metrics: Metrics) -> None:
        done = self.done
        self.watch.at(done, "agreeing on what to do next")
        late_here = comm.world().rank == 0 and self.checkpoints.late()
        number, late, failed = agreed(_number(self.flag), late_here, self.checkpoints.failed)
        if failed:
            self.checkpoints.wait()  # raises on all ranks
        if self.metrics.due(done):
            self.watch.at(done, "logging")
            self.metrics.log(done, metrics)
            if self._judge():
                return
        if self.evaluation is not None and self.evaluation.due(done):
            self._evaluate()  # before the checkpoint, or a run that is killed between them would never evaluate
        if number or late or self.checkpoints.due(done):
            self._save(reader)
        if number:
            self.watch.at(done, "waiting for the checkpoint to be written")
            self.checkpoints.wait()
            raise Interrupted(number, done, self.state)

    def _evaluate(self) -> None:
        if self.evaluation is not None and self.evaluated != self.done:
            self.watch.at(self.done, "evaluating")
            with self.metrics.apart():
                with forked_rng():  # not a part of the training
                    numbers = self.evaluation.function(self.state)
                self.metrics.evaluated(self.done, numbers)
            self.evaluated = self.done

    # -- losses that are not finite ------------------------------------------------------------------------------------

    def _save(self, reader: BatchReader) -> None:
        """Makes a checkpoint, if losses and params are finite."""
        if self.checkpoints.policy is None:
            return
        self.watch.at(self.done, "saving")
        if self.on_non_finite is not None:
            verdict = self.health.verdict(self._finite())
            if verdict.streak or verdict.spoiled or verdict.worst >= self.on_non_finite.after:
                return
        with self.metrics.apart():
            self.checkpoints.save(self.state, done=self.done, data=reader.position, rollbacks=self.progress.rollbacks)

    def _finite(self) -> Tensor:
        """Whether all trained params are finite. Offloaded ones are fetched one at a time. One collective."""
        device, leaves = self.state.step.device, tree.leaves(self.state.params)
        here = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device == device and is_trainable(leaf)]
        offloaded = torch.zeros((), device=device)  # stands for all offloaded params, of which ranks have different numbers
        for leaf in leaves:
            away = not isinstance(leaf, Tensor) or leaf.device != device
            if away and (leaf.is_floating_point() or leaf.is_complex()):
                offloaded = torch.where(leaf.detach().to(device).isfinite().all(), offloaded, torch.nan)
        return self.step.finite(self.state, [*here, offloaded])

    def _judge(self) -> bool:
        """Checks the losses since the last check; returns whether the run was rolled back."""
        rule = self.on_non_finite
        if rule is None:
            return False
        verdict, self.health = self.health.verdict(), self.health.judged()
        if verdict.worst < rule.after:
            return False
        if not isinstance(rule, RollBack) or self.progress.rollbacks >= rule.times:
            raise NonFiniteLossError(self._report(verdict, rule))
        self._roll_back()
        return True

    def _roll_back(self) -> None:
        self.watch.at(self.done, "rolling back")
        self.checkpoints.wait()
        checkpoint = self.checkpoints.newest(self.state, donate=True)
        if checkpoint is None:
            raise NonFiniteLossError(f"the checkpoint to roll back to is gone from {self.checkpoints.policy}")
        self.state, before = checkpoint
        self.progress = attrs.evolve(before, rollbacks=self.progress.rollbacks + 1)
        self.health = Health()
        self.metrics.begin(self.done)
        if not self.done:  # the log begins anew, with what comes before the first step
            self.evaluated = None
            self._evaluate()

    def _report(self, verdict: Verdict, rule: Any) -> str:
        saved = self.checkpoints.saved
        last = "no checkpoint was made" if saved is None else f"the last checkpoint is that of step {saved}"
        times = f", after {self.progress.rollbacks} roll-backs" if self.progress.rollbacks else ""
        return (
            f"by step {self.done} the loss was not finite {verdict.worst} times in a row{times} (on_non_finite={rule}); "
            f"{last}. Look at the learning rate, the data and the loss scale"
        )


def _number(flag: Flag) -> int:
    return int(getattr(flag, "number", _SIGINT)) if flag.is_set() else 0
