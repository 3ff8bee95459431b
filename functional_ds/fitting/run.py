"""One run of ``fit``: its steps, and what is done between two of them."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import is_trainable
from functional_ds.step.state import State
from functional_ds.step.step import Metrics, Step

from .checkpoints import Keeper, Place
from .data import Reader, Source, own
from .loggers import Journal
from .non_finite import Health, NonFiniteLossError, OnNonFinite, RollBack, Verdict
from .rng import Generators
from .signals import Flag
from .watchdog import Watch

__all__ = ["Interrupted", "Plan", "Run"]

_SIGINT = 2  # what a flag that does not say which signal set it counts as


class Interrupted(SystemExit):
    """A run was asked to end and did, with everything written.

    Attributes:
        done: how many steps are made.
        state: after these; None where the exception came from another process.
    """

    def __init__(self, number: int, done: int, state: State | None = None) -> None:
        super().__init__(128 + number)
        self.number, self.done, self.state = number, done, state

    def __reduce__(self) -> tuple[Any, ...]:
        return Interrupted, (self.number, self.done)

    def __str__(self) -> str:
        return f"interrupted by signal {self.number} after step {self.done}"


@attrs.frozen
class Plan:
    """What is to be done.

    Attributes:
        steps: how many in all; None for as long as there are batches.
        evaluate: from a state to numbers.
        evaluate_every: after each so many steps.
        on_non_finite: what to do when losses are not finite.
    """

    steps: int | None
    evaluate: Callable[[State], Mapping[str, Any]] | None
    evaluate_every: int | None
    on_non_finite: OnNonFinite

    def __attrs_post_init__(self) -> None:
        for name, least in (("steps", 0), ("evaluate_every", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r}: a number of steps is at least {least}")
        if self.evaluate_every is not None and self.evaluate is None:
            raise ValueError(f"evaluate_every={self.evaluate_every}: pass evaluate, what to do then")


@attrs.define(eq=False)
class Run:
    """A run under way; every rank has one, and all decide alike."""

    step: Step
    plan: Plan
    source: Source
    keeper: Keeper
    journal: Journal
    watch: Watch
    flag: Flag
    generators: Generators
    state: State
    place: Place = attrs.field(factory=Place)
    health: Health = attrs.field(factory=Health)
    evaluated: int | None = None

    def resume(self) -> None:
        """Goes on from the newest checkpoint, where there is one."""
        self.state, self.place = self.keeper.newest(self.state, donate=True) or (self.state, self.place)

    def go(self) -> State:
        """Makes the steps that are left."""
        self.watch.at(self.place.done, "finding the next batch")
        reader = self.source.at(None if self.place.data is None else own(self.place.data))
        self.generators.restore(self.place.generators)  # drawing batches again has drawn numbers
        self.journal.begin(self.place.done)
        began = self.place.done
        if began == 0:
            if isinstance(self.plan.on_non_finite, RollBack):
                self._save(reader)
            self._evaluate()
        while self.plan.steps is None or self.place.done < self.plan.steps:
            batch = self._draw(reader)
            if batch is None:
                break
            self._end_step(reader, self._move(batch[0]))
        if self.place.done > began:
            self._evaluate()
        self._save(reader)
        self.watch.at(self.place.done, "waiting for the checkpoint to be written")
        self.keeper.wait()
        return self.state

    # -- a step --------------------------------------------------------------------------------------------------------

    def _draw(self, reader: Reader) -> tuple[Any] | None:
        """The next batch; None where a rank has none left and none are owed."""
        self.watch.at(self.place.done + 1, "drawing a batch")
        found: tuple[Any] | None
        try:
            found = (next(reader),)
        except StopIteration:
            found = None
        if self.plan.steps is None:
            return None if _agreed(found is None)[0] else found
        if found is None:
            raise ValueError(
                f"batches: rank {comm.world().rank} has none for step {self.place.done + 1} of steps={self.plan.steps}; "
                "pass fewer steps, steps=None to end where the batches do, or fitting.Epochs(batches) to go over them again"
            )
        return found

    def _move(self, batch: Any) -> Metrics:
        self.watch.at(self.place.done + 1, "in the step")
        self.state, metrics = self.step(self.state, batch)
        self.place = attrs.evolve(self.place, done=self.place.done + 1)
        if self.plan.on_non_finite is not None:
            self.health = self.health.after(metrics["loss"])
        self.journal.moved()
        return metrics

    def _end_step(self, reader: Reader, metrics: Metrics) -> None:
        done = self.place.done
        self.watch.at(done, "agreeing on what is next")
        number, late = _agreed(_number(self.flag), comm.world().rank == 0 and self.keeper.late())
        self.keeper.check()
        if self.journal.due(done):
            self.watch.at(done, "logging")
            self.journal.log(done, metrics)
            if self._judge():
                return
        if self.plan.evaluate_every is not None and done % self.plan.evaluate_every == 0:
            self._evaluate()  # before the checkpoint, or a run that ends between them would never have evaluated
        if number or late or self.keeper.due(done):
            self._save(reader)
        if number:
            self.watch.at(done, "waiting for the checkpoint to be written")
            self.keeper.wait()
            raise Interrupted(number, done, self.state)

    def _evaluate(self) -> None:
        if self.plan.evaluate is not None and self.evaluated != self.place.done:
            self.watch.at(self.place.done, "evaluating")
            with self.generators.apart():
                numbers = self.plan.evaluate(self.state)
            self.journal.evaluated(self.place.done, numbers)
            self.evaluated = self.place.done

    # -- losses that are not finite ------------------------------------------------------------------------------------

    def _save(self, reader: Reader) -> None:
        """Makes a checkpoint, if all is finite."""
        if self.keeper.path is None:
            return
        self.watch.at(self.place.done, "saving")
        if self.plan.on_non_finite is not None:
            verdict = self.health.verdict(self._finite())
            if verdict.streak or verdict.spoiled or verdict.worst >= self.plan.on_non_finite.after:
                return
        self.keeper.save(
            self.state, self.generators, done=self.place.done, data=reader.position, rollbacks=self.place.rollbacks
        )

    def _finite(self) -> Tensor:
        """Whether all trained params are; those that lie elsewhere are fetched one at a time. Collective, once."""
        device, leaves = self.state.step.device, tree.leaves(self.state.params)
        here = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device == device and is_trainable(leaf)]
        whole = torch.zeros((), device=device)  # stands for all that lies elsewhere, of which ranks have different numbers
        for leaf in leaves:
            away = not isinstance(leaf, Tensor) or leaf.device != device
            if away and (leaf.is_floating_point() or leaf.is_complex()):
                whole = torch.where(leaf.detach().to(device).isfinite().all(), whole, torch.nan)
        return self.step.finite(self.state, [*here, whole])

    def _judge(self) -> bool:
        """Whether the run was rolled back."""
        rule = self.plan.on_non_finite
        if rule is None:
            return False
        verdict, self.health = self.health.verdict(), self.health.judged()
        if verdict.worst < rule.after:
            return False
        if not isinstance(rule, RollBack) or self.place.rollbacks >= rule.times:
            raise NonFiniteLossError(self._story(verdict, rule))
        self._roll_back()
        return True

    def _roll_back(self) -> None:
        self.watch.at(self.place.done, "rolling back")
        self.keeper.wait()
        found = self.keeper.newest(self.state, donate=True)
        if found is None:
            raise NonFiniteLossError(f"the checkpoint to roll back to is gone from {self.keeper.path}")
        self.state, before = found
        self.place = attrs.evolve(before, rollbacks=self.place.rollbacks + 1)
        self.health = Health()
        self.journal.begin(self.place.done)
        if not self.place.done:  # the log begins anew, with what comes before the first step
            self.evaluated = None
            self._evaluate()

    def _story(self, verdict: Verdict, rule: Any) -> str:
        last = (
            "no checkpoint was made"
            if self.keeper.saved is None
            else f"the last checkpoint is that of step {self.keeper.saved}"
        )
        times = f", after {self.place.rollbacks} roll-backs" if self.place.rollbacks else ""
        return (
            f"by step {self.place.done} the loss was not finite {verdict.worst} times in a row{times} (on_non_finite={rule}); "
            f"{last}. Look at the learning rate, the data and the loss scale"
        )


def _number(flag: Flag) -> int:
    return int(getattr(flag, "number", _SIGINT)) if flag.is_set() else 0


def _agreed(*mine: int) -> list[int]:
    """The largest of all ranks' numbers, each by itself."""
    found: list[int] = comm.all_reduce(
        torch.tensor([int(x) for x in mine], device=comm.world().world.device), op="max"
    ).tolist()
    return found
