"""A whole step without values, as one rank of many: what is allocated at most, what is sent, which operations run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.torch_private import CPU_ATTENTION, CUDA_ATTENTION, TorchDispatchMode, instead_of_engine
from functional_ds.base.weighted import weigh
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.comm.record.ledger import Ledger, Row
from functional_ds.comm.worlds.gloo_shapes import GlooShapesWorld
from functional_ds.comm.worlds.shapes import ShapesWorld, rank_on_shapes
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_subject import Subject
from functional_ds.jobs.strategy import rows_of_rank
from functional_ds.memory.account import Memory
from functional_ds.memory.counting import Live
from functional_ds.memory.predict import predicted
from functional_ds.modules.operation_cost import OperationCounter, SizedOperation

from .candidate import name_of

__all__ = ["StepAllocations", "StepShape", "sent_by_all", "step_shape"]


@attrs.frozen
class StepShape:
    """What a rank's step is like.

    Attributes:
        memory: by kind, between steps and of gradients and gathered units.
        peak: the most bytes that are allocated at one time, batch included; without a loss, of the state and gradients alone.
        sent: the ledger's rows of a step.
        flops: of a step, on this rank; 0 without a loss.
        work: how often each operation runs; empty without a loss.
        complete: whether the model's own loss ran, so that activations are in the peak.
    """

    memory: Memory
    peak: int
    sent: tuple[Row, ...]
    flops: int
    work: Mapping[SizedOperation, int] = attrs.field(hash=False, repr=False)
    complete: bool

    @property
    def activations(self) -> int:
        """What of the peak is in no other kind: activations, and gradients before they are reduced."""
        return max(0, self.peak - self.memory.total)


class StepAllocations(TorchDispatchMode):
    """Notes the results of each operation: ``live.peak`` is the most that was alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = Live()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.live.note(x for x in tree.leaves(found) if isinstance(x, Tensor))
        return found


class _OwnOperations(OperationCounter):
    """Counts the step's operations; those inside of collectives are communication."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(comm.world().world, "communicating", False):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class _KernelsOf(TorchFunctionMode):
    """On the meta device attention runs by the kernel that a device would choose, not by products of whole matrices.

    With ``whole``, a question about values is answered with yes: Hugging Face's models ask whether rows are neither padded nor
    packed.
    """

    def __init__(self, device: str, whole: bool) -> None:
        super().__init__()
        self._device, self._whole = device, whole

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._whole and function is Tensor.__bool__ and args[0].is_meta:
            return True
        if function is F.scaled_dot_product_attention and args[0].is_meta:
            found = self._attention(*args, **kwargs)
            if found is not None:
                return found
        return function(*args, **kwargs)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        if q.dim() != 4 or q.shape[-1] != v.shape[-1] or dropout_p:
            return None
        if enable_gqa and k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if self._device == "cpu":
            found: Tensor = CPU_ATTENTION(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
            return found
        half = q.dtype in (torch.float16, torch.bfloat16)
        if attn_mask is None and half:
            flash: Tensor = CUDA_ATTENTION(q, k, v, 0.0, is_causal, False, scale=scale)[0]
            return flash
        return None


@contextmanager
def _kernels_of(device: str, *, whole: bool) -> Iterator[None]:
    """``_KernelsOf``, also within backward passes, which recompute: torch leaves function modes before them."""
    mode = _KernelsOf(device, whole)

    def within(run_backward: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    with mode, instead_of_engine(within):
        yield


def step_shape(subject: Subject, candidate: Job, *, rank: int = 0, device: str = "cpu") -> StepShape:
    """Runs a candidate's step without values, as one rank of ``candidate.world_size`` whose other ranks do the same.

    Law 20: the bytes of the state are those that ``fds.memory.measured`` finds in a run. Law 21: so are those sent.

    Args:
        subject: the model, on the meta device.
        candidate: the strategy.
        rank: as which rank.
        device: the kind of device whose kernels are meant.

    Raises:
        CommandError: the strategy is refused, or the model's loss reads values.
    """
    subject, batch, complete = _with_batch(subject, candidate)

    def make() -> Any:
        return subject.step(candidate)

    def program() -> tuple[int, tuple[Row, ...], OperationCounter]:
        step = make()
        state = step.init(subject.params)
        for _ in range(2):  # the first step learns in which order units are used, and the second agrees on it
            state, _ = step(state, batch)
        with StepAllocations() as noted, _OwnOperations() as counter, comm.ledger() as book:
            noted.live.note(x for x in tree.leaves((state, batch)) if isinstance(x, Tensor))
            step(state, batch)
        return noted.live.peak, tuple(book.rows), counter

    with _named(candidate), _kernels_of(device, whole=subject.config is not None):
        memory = predicted(make, subject.params, world_size=candidate.world_size, rank=rank)
        kind = GlooShapesWorld if device == "cpu" else ShapesWorld
        peak, sent, counter = rank_on_shapes(program, world_size=candidate.world_size, rank=rank, kind=kind)
    if not complete:
        return StepShape(memory, memory.total, sent, 0, {}, complete)
    return StepShape(memory, peak, sent, counter.total, dict(counter.operations), complete)


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
        state, _ = step(step.init(subject.params), batch)
        with comm.ledger() as book:
            step(state, batch)
        return book

    with _named(candidate), _kernels_of("cpu", whole=subject.config is not None):
        return comm.simulate(program, world_size=candidate.world_size, shapes_only=True)


def _with_batch(subject: Subject, candidate: Job) -> tuple[Subject, Any, bool]:
    """The model with what it minimises, a rank's batch, and whether that is the model's own loss."""
    rows = rows_of_rank(candidate)
    subject = subject.piped_for(candidate)
    if subject.loss is None or subject.batch is None:
        return attrs.evolve(subject, loss=_uses_all), torch.empty(rows, device="meta"), False
    try:
        batch = subject.batch(rows)
    except Exception as error:
        raise CommandError(f"MODEL: {subject.name}: batch({rows}) raised {type(error).__name__}: {error}") from error
    found = {leaf.shape[0] if leaf.dim() else None for leaf in tree.leaves(batch) if isinstance(leaf, Tensor)}
    if found != {rows}:
        there = ", ".join(sorted(map(str, found)))
        raise CommandError(f"MODEL: {subject.name}: batch({rows}) should have {rows} rows in each tensor, and has {there}")
    return subject, batch, True


def _uses_all(params: Any, batch: Any) -> Any:
    """A loss that uses every leaf, for a model of which only the shapes are known."""
    used = [leaf.abs().square().sum().float() for leaf in tree.leaves(params) if leaf.is_floating_point()]
    return weigh(sum(used), "the loss")


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
