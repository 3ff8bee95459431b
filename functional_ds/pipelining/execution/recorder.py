"""``Recorder``: records the times of a rank's actions and waits, and the bytes of activations."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds import comm
from functional_ds.comm.worlds.current import recorder
from functional_ds.pipelining.planning.costs import Costs
from functional_ds.pipelining.planning.observed import observed
from functional_ds.pipelining.planning.timeline import Timeline, WaitSpan
from functional_ds.pipelining.schedules.action import COMPUTE, Action, Kind
from functional_ds.pipelining.schedules.schedule import Schedule

StoragesByForward = dict[
    tuple[int, int], Mapping[StorageWeakRef, int]
]  # the storages that forwards left, by (stage, micro-batch)


@attrs.define(eq=False, repr=False)
class Recorder:
    """Records a pipeline's last step on this rank: pass it to ``pipeline(..., recorder=)``.

    An action's time is only its computation. Waits and gathers of params come before it, as separate spans. Collectives that a
    stage's own function calls are part of its computation. On CUDA the host synchronises with the current stream before and
    after each action and wait.

    Attributes:
        clock: in seconds; ``run`` measures the offsets of other ranks' clocks.
        times: start and end of each compute action, in the row's order.
        waits: what this rank waited for, in order.
        saved: bytes that each forward kept for its backward, by (stage, micro-batch).
        peak: the peak of these bytes; memory kept by several forwards counts once. Params, the batch and what outlives the step
            (module buffers) do not count.

    >>> Recorder()
    <Recorder: 0 actions, peak 0 bytes>
    """

    clock: Callable[[], float] = perf_counter
    times: list[tuple[float, float]] = attrs.field(factory=list, init=False)
    waits: list[WaitSpan] = attrs.field(factory=list, init=False)
    saved: dict[tuple[int, int], int] = attrs.field(factory=dict, init=False)
    peak: int = attrs.field(default=0, init=False)
    _began: float = attrs.field(default=0.0, init=False)  # the computation of the current action
    _held: list[StoragesByForward] = attrs.field(factory=list, init=False)  # after each forward
    _now_held: StoragesByForward = attrs.field(factory=dict, init=False)

    def __repr__(self) -> str:
        return f"<Recorder: {len(self.times)} actions, peak {self.peak:,} bytes>"

    def begin(self) -> None:
        """Clears the previous step."""
        if recorder().traces:
            raise RuntimeError("a pipeline's recorder= notes actions as they run, and a graph runs none")
        self.times.clear()
        self.waits.clear()
        self.saved.clear()
        self._held.clear()
        self._now_held = {}
        self.peak = 0

    def end(self) -> None:
        """Adds up the bytes. What still exists after all backwards was not an activation."""
        seen = {storage for held in self._held for sizes in held.values() for storage in sizes}
        if not all(storage.expired() for storage in seen):
            gc.collect()  # a graph may be in a cycle
        lasting = {storage for storage in seen if not storage.expired()}
        for held in self._held:
            for micro, sizes in held.items():
                self.saved[micro] = sum(size for storage, size in sizes.items() if storage not in lasting)
            union = {storage: size for sizes in held.values() for storage, size in sizes.items() if storage not in lasting}
            self.peak = max(self.peak, sum(union.values()))
        self._held.clear()

    @contextmanager
    def action(self, action: Action, apart: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Surrounds each action. The tensors of ``apart()`` (params, the batch) do not count as activations."""
        self._began, micro = self._now(), (action.stage, action.microbatch)
        if action.kind is Kind.F:
            with SavedBytes(apart) as saved:
                yield
                ended = self._now()
            self._now_held = {**self._now_held, micro: saved.sizes}
            self._held.append(self._now_held)
        else:
            yield
            ended = self._now()
        if action.kind in (Kind.B, Kind.W):
            self._now_held = {key: sizes for key, sizes in self._now_held.items() if key != micro}
        if action.kind in COMPUTE:
            self.times.append((self._began, ended))

    @contextmanager
    def waiting(self, action: Action, rank: int | None = None) -> Iterator[None]:
        """Surrounds a wait; the computation of the current action begins after it.

        Args:
            action: what is waited for: a message that is received or sent, or a gather.
            rank: the other end of the message.
        """
        began = self._now()
        yield
        self._began = self._now()
        self.waits.append(WaitSpan(action, rank, began, self._began))

    def _now(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self.clock()

    def run(self, schedule: Schedule, group: comm.Group, *, costs: Costs | None = None) -> Timeline:
        """The last step of all ranks as a timeline, on the first rank's clock; collective.

        Law: its bubble is at least its ``least_bubble`` (on several machines, within the error of the clocks' offsets).

        Args:
            schedule: what ran.
            group: the pipeline's ranks.
            costs: for the timeline's memory; by default units.

        Raises:
            ValueError: no step was recorded with this schedule.
        """
        offsets = comm.debug.clock_offsets(group, clock=self.clock)
        by_rank = comm.all_gather_object((self.times, self.waits), group)
        times, waits = [], []
        for (spans, waited), more in zip(by_rank, offsets.seconds, strict=True):
            times.append([(start + more, end + more) for start, end in spans])
            waits.append([wait._replace(start=wait.start + more, end=wait.end + more) for wait in waited])
        return observed(schedule, times, costs, waits=waits, error=2 * offsets.error)


class SavedBytes:
    """Counts the bytes of the distinct storages that autograd saves inside and still holds at the end, except ``apart()``.

    >>> x = torch.ones(3, requires_grad=True)
    >>> with SavedBytes() as saved:
    ...     y = (x * 2).exp().sin()  # exp keeps its result, and sin its argument, which is the same
    >>> saved.bytes
    12
    """

    def __init__(self, apart: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._apart = apart
        self.sizes: dict[StorageWeakRef, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept)

    @property
    def bytes(self) -> int:
        """The bytes that were saved."""
        return sum(self.sizes.values())

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        for tensor in self._apart():
            self.sizes.pop(StorageWeakRef(tensor.untyped_storage()), None)
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        return tensor.detach() if tensor.grad_fn is not None else tensor  # an output itself would keep its own node alive
