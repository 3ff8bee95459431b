"""Dry runs of a whole step as one rank of many: peak memory, communication, operations."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.comm.record.ledger import Ledger, Row
from functional_ds.comm.worlds.gloo_shapes import GlooShapesWorld
from functional_ds.comm.worlds.shapes import ShapesWorld, rank_on_shapes
from functional_ds.dry_run.dry_run import dry_run, kernels_of, loss_of_all
from functional_ds.dry_run.events import Events
from functional_ds.dry_run.operations import SizedOperation
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_subject import Subject
from functional_ds.jobs.strategy import rows_of_rank
from functional_ds.memory.account import Memory
from functional_ds.memory.predict import predicted

from .candidate import name_of


@attrs.frozen(slots=False)
class StepShape:
    """The dry run of a rank's step.

    Attributes:
        memory: by category, between steps and of gradients and gathered units.
        peak: the peak bytes, batch included; without a loss, only of the state and gradients.
        events: operations and collectives of a step on this rank, in order; without a loss, only collectives.
        complete: whether the model's own loss ran, so that activations are in the peak.
    """

    memory: Memory
    peak: int
    events: Events = attrs.field(hash=False, repr=False)
    complete: bool

    @cached_property
    def sent(self) -> tuple[Row, ...]:
        """The ledger's rows of a step."""
        return tuple(self.events.sent)

    @cached_property
    def work(self) -> Mapping[SizedOperation, int]:
        """How often each operation runs."""
        return self.events.work

    @property
    def flops(self) -> int:
        """Of a step, on this rank."""
        return self.events.flops

    @property
    def activations(self) -> int:
        """The part of the peak in no other category: activations, and gradients before they are reduced."""
        return max(0, self.peak - self.memory.total)


def step_shape(subject: Subject, candidate: Job, *, rank: int = 0, device: str = "cpu", ranks_per_node: int = 1) -> StepShape:
    """Runs a candidate's step without values, as one rank of ``candidate.world_size`` whose other ranks do the same.

    The bytes of the state are those that ``fds.memory.measured`` gives in a run, and so are those sent.

    Args:
        subject: the model, on the meta device.
        candidate: the strategy.
        rank: as which rank.
        device: the device type whose kernels are assumed.
        ranks_per_node: how many share a node; on a CPU, collectives are hierarchical then.

    Raises:
        CommandError: the strategy is unsupported, or the model's loss reads values.
    """
    subject, batch, complete = _with_batch(subject, candidate)

    def program() -> Events:
        step = subject.step(candidate)
        return dry_run(step, step.init(subject.params), batch)

    with _named(candidate), kernels_of(device, whole=subject.config is not None):
        memory = predicted(lambda: subject.step(candidate), subject.params, world_size=candidate.world_size, rank=rank)
        kind, per_node = (GlooShapesWorld, ranks_per_node) if device == "cpu" else (ShapesWorld, 1)
        events = rank_on_shapes(program, world_size=candidate.world_size, rank=rank, kind=kind, ranks_per_node=per_node)
    shown = (Row, SizedOperation) if complete else (Row,)
    ordered = Events(event for event in events if isinstance(event, shown))
    return StepShape(memory, events.peak() if complete else memory.total, ordered, complete)


def sent_by_all(subject: Subject, candidate: Job) -> list[Ledger]:
    """The ledger of every rank for one step, each of which runs without values.

    Args:
        subject: the model, on the meta device.
        candidate: the strategy.

    Raises:
        CommandError: as ``step_shape``.
    """
    subject, batch, _ = _with_batch(subject, candidate)

    def program() -> Ledger:
        step = subject.step(candidate)
        return Ledger(comm.world().rank, rows=dry_run(step, step.init(subject.params), batch).sent)

    with _named(candidate), kernels_of("cpu", whole=subject.config is not None):
        return comm.simulate(program, world_size=candidate.world_size, shapes_only=True)


def _with_batch(subject: Subject, candidate: Job) -> tuple[Subject, Any, bool]:
    """The model with what it minimises, a rank's batch, and whether that is the model's own loss."""
    rows = rows_of_rank(candidate)
    subject = subject.piped_for(candidate)
    if subject.loss is None or subject.batch is None:
        return attrs.evolve(subject, loss=loss_of_all(subject.params)), torch.empty(rows, device="meta"), False
    try:
        batch = subject.batch(rows)
    except Exception as error:
        raise CommandError(f"MODEL: {subject.name}: batch({rows}) raised {type(error).__name__}: {error}") from error
    row_counts = {leaf.shape[0] if leaf.dim() else None for leaf in tree.leaves(batch) if isinstance(leaf, Tensor)}
    if row_counts != {rows}:
        there = ", ".join(sorted(map(str, row_counts)))
        raise CommandError(f"MODEL: {subject.name}: batch({rows}) should have {rows} rows in each tensor, and has {there}")
    return subject, batch, True


@contextmanager
def _named(candidate: Job) -> Iterator[None]:
    try:
        yield
    except CommandError:
        raise
    except NotImplementedError as error:
        raise CommandError(f"MODEL: its loss reads values, which shapes do not have: {error}") from error
    except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError) as error:
        raise CommandError(f"{name_of(candidate)}: {type(error).__name__}: {error}") from error
