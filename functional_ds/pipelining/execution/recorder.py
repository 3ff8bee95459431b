"""``Recorder``: when a rank's actions ran, and how many bytes their activations held."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import attrs
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from functional_ds import comm
from functional_ds.base.torch_private import storage_id
from functional_ds.pipelining.planning.costs import Costs
from functional_ds.pipelining.planning.timeline import Timeline, observed
from functional_ds.pipelining.schedules.action import COMPUTE, Action, Kind
from functional_ds.pipelining.schedules.schedule import Schedule

__all__ = ["Recorder", "SavedBytes"]


@attrs.define(eq=False, repr=False)
class Recorder:
    """Records a pipeline's last step on this rank: hand it to ``pipeline(..., recorder=)``.

    Attributes:
        times: start and end of each compute action, in the row's order (seconds of ``time.perf_counter``).
        saved: bytes that each forward left for its backward, by (stage, micro-batch).
        peak: the most bytes that were held for backwards at a time.

    >>> Recorder()
    <Recorder: 0 actions, peak 0 bytes>
    """

    times: list[tuple[float, float]] = attrs.field(factory=list)
    saved: dict[tuple[int, int], int] = attrs.field(factory=dict)
    peak: int = 0
    _held: int = 0

    def __repr__(self) -> str:
        return f"<Recorder: {len(self.times)} actions, peak {self.peak:,} bytes>"

    def begin(self) -> None:
        """Forgets the step before."""
        self.times.clear()
        self.saved.clear()
        self.peak = self._held = 0

    @contextmanager
    def action(self, action: Action, apart: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Surrounds each action. The tensors of ``apart()`` (params, the batch) do not count as activations."""
        start = perf_counter()
        if action.kind is Kind.F:
            with SavedBytes(apart) as saved:
                yield
            self.saved[action.stage, action.microbatch] = saved.bytes
            self._held += saved.bytes
            self.peak = max(self.peak, self._held)
        else:
            yield
        if action.kind in (Kind.B, Kind.W):
            self._held -= self.saved[action.stage, action.microbatch]
        if action.kind in COMPUTE:
            self.times.append((start, perf_counter()))

    def run(self, schedule: Schedule, group: comm.Group, *, costs: Costs | None = None) -> Timeline:
        """The last step of all ranks as a timeline; collective.

        Ranks on one machine share a clock. Clocks of different machines differ, and are not corrected.

        Args:
            schedule: what ran.
            group: the pipeline's ranks.
            costs: for the timeline's memory; by default units.
        """
        return observed(schedule, comm.all_gather_object(self.times, group), costs)


class SavedBytes:
    """Counts the bytes of the distinct storages that autograd saves inside, without those of ``apart()``.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> with SavedBytes() as saved:
    ...     y = (x * 2).exp().sin()  # exp keeps its result, and sin its argument, which is the same
    >>> saved.bytes
    12
    """

    def __init__(self, apart: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._apart = apart
        self._sizes: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept)

    @property
    def bytes(self) -> int:
        """The bytes that were saved."""
        return sum(self._sizes.values())

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        for tensor in self._apart():
            self._sizes.pop(storage_id(tensor), None)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._sizes[storage_id(storage)] = storage.nbytes()
        return tensor.detach() if tensor.grad_fn is not None else tensor  # an output itself would hold on to its own node
