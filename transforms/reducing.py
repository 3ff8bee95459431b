"""Reducing units' gradients: each as soon as it is complete, in one order on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.layout import Layout
from functional_ds.tape import wide

__all__ = ["Order", "Reducer"]

_IN_FLIGHT = 2  # reductions under way at once; each holds a whole unit's gradients


@attrs.define(eq=False)
class Order:
    """The order in which the ranks reduce units: at first the reverse of the layout's, then as rank 0 completed them."""

    units: tuple[int, ...]
    learned: bool = False
    patience: float = 2.0  # seconds to wait for room; none any more once that was in vain


@attrs.define(eq=False)
class Reducer:
    """Takes the gradients of a pass's units as they are completed, and gives those of the stored leaves.

    Gradients of a segment are first summed locally (``local``: over its uses and, in stages 0 and 1, over earlier
    micro-batches), then over the ranks, then onto ``sums`` (in stages 2 and 3, earlier micro-batches' shards).

    Law: every rank reduces every unit once, in ``order``, whenever and in whatever order it completes them.

    Attributes:
        scatter: whether each rank keeps its shard of the sum (else the whole).
        reduce: how units are reduced: a reduce_scatter, or else an all_reduce.
        now: whether this pass reduces over the ranks (else the sums stay local).
        more: whether further micro-batches will be added to what this pass gives.
        waiting: for each unit, how many backward nodes are still to come.
    """

    layout: Layout
    group: comm.Group
    order: Order
    scatter: bool
    reduce: Callable[..., Any]
    now: bool
    more: bool
    local: dict[int, Tensor]
    sums: dict[int, Tensor]
    waiting: dict[int, int] = attrs.field(factory=dict)
    completed: list[int] = attrs.field(factory=list)
    _posted: int = 0
    _under_way: "list[tuple[int, comm.Pending[list[Tensor]]]]" = attrs.field(factory=list)

    def trained(self, unit: int) -> list[int]:
        """The unit's segments that get gradients."""
        return [index for index in self.layout.units[unit].segments if self.layout.segments[index].trainable]

    def add(self, unit: int, grads: Sequence[Tensor | None], device: torch.device) -> None:
        """One backward node's gradients of a unit's trained leaves, in layout order; None or none at all stand for zero."""
        found = iter(grads)
        for index in self.trained(unit):
            self._pack(index, [next(found, None) for _ in self.layout.segments[index].slots], device)
        self.waiting[unit] -= 1
        if not self.waiting[unit]:
            self.completed.append(unit)
            self._post()

    def finish(self) -> list[Tensor]:
        """All gradients, one a trained segment, once everything is reduced."""
        results = self.local
        if self.now:
            while self._under_way:
                self._settle()
            self._learn()
            results = self.sums
        return [results[index] for index, segment in enumerate(self.layout.segments) if segment.trainable]

    def _pack(self, index: int, leaves: Sequence[Tensor | None], device: torch.device) -> None:
        segment = self.layout.segments[index]
        fresh = index not in self.local
        if fresh:
            self.local[index] = self._room(index, leaves, device)
        pairs = zip(segment.views(self.local[index]), leaves, strict=True)
        found = [(view, grad) for view, grad in pairs if grad is not None and grad.numel()]
        if found:
            move = torch._foreach_copy_ if fresh else torch._foreach_add_
            move([view for view, _ in found], [grad for _, grad in found])

    def _room(self, index: int, leaves: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """A flat tensor for a segment, zero where no gradient comes; fp32 for half-precision sums that grow or have grown."""
        segment = self.layout.segments[index]
        half = segment.dtype in (torch.float16, torch.bfloat16)
        grown = not self.now or any(leaf is not None and leaf.dtype == torch.float32 for leaf in leaves)
        dtype = torch.float32 if half and grown else segment.dtype
        size = self.layout.n * segment.shard
        covered = sum(slot.numel for slot, leaf in zip(segment.slots, leaves, strict=True) if leaf is not None)
        return (torch.empty if covered == size else torch.zeros)(size, dtype=dtype, device=device)

    def _post(self) -> None:
        """Starts the reductions whose turn it is."""
        turns = self.order.units
        while self.now and self._posted < len(turns) and turns[self._posted] in self.completed:
            unit = turns[self._posted]
            self._posted += 1
            self._make_room()
            self._start(unit)

    def _make_room(self) -> None:
        """Waits for earlier reductions, but not for ever: whoever is to join them may need a unit from this rank first.

        That happens where ranks touch units in different orders. Then memory is given up for the sake of going on.
        """
        while len(self._under_way) >= _IN_FLIGHT:
            if not self._under_way[0][1].poll(self.order.patience):
                self.order.patience = 0.0
                return
            self._settle()

    def _start(self, unit: int) -> None:
        flats = [self.local.pop(index) for index in self.trained(unit)]
        if self.group.size == 1:
            self._take(unit, flats)
        elif self.scatter:
            rows = [flat.view(self.group.size, -1) for flat in flats]  # [n * m] -> [n, m]
            self._under_way.append((unit, self.reduce(rows, self.group, tiled=False, async_op=True)))
        else:
            self._under_way.append((unit, self.reduce(flats, self.group, async_op=True)))

    def _settle(self) -> None:
        unit, pending = self._under_way.pop(0)
        self._take(unit, pending.wait())

    def _take(self, unit: int, reduced: Sequence[Tensor]) -> None:
        for index, value in zip(self.trained(unit), reduced, strict=True):
            if index in self.sums:
                self.sums[index].add_(value)
            else:
                self.sums[index] = wide(value) if self.more and value.element_size() == 2 else value

    def _learn(self) -> None:
        """From the second pass on, the order is the one in which rank 0 completed the units of the first."""
        if not self.order.learned:
            agreed = comm.broadcast(torch.tensor(self.completed, dtype=torch.int64), 0, self.group.channel("control"))
            self.order.units, self.order.learned = tuple(agreed.tolist()), True
