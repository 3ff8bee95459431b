"""Reducing units' gradients: each as soon as it is complete, in one order on all ranks."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.torch_private import foreach_add_, foreach_copy_
from functional_ds.comm.record.pending import relay
from functional_ds.sharding.layout import Layout
from functional_ds.step.tape import dense, wide

from .collectives import Carriage

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
        carriage: how units are reduced.
        now: whether this pass reduces over the ranks (else the sums stay local).
        more: whether further micro-batches will be added to what this pass gives.
        waiting: for each unit, how many backward nodes are still to come.
    """

    layout: Layout
    carriage: Carriage
    order: Order
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
        found = [(view, dense(grad)) for view, grad in pairs if grad is not None and grad.numel()]
        if found:
            move = foreach_copy_ if fresh else foreach_add_
            move([view for view, _ in found], [grad for _, grad in found])

    def _room(self, index: int, leaves: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """A flat tensor for a segment, zero where no gradient comes; fp32 for half-precision sums that grow or have grown."""
        segment = self.layout.segments[index]
        half = segment.dtype in (torch.float16, torch.bfloat16)
        grown = not self.now or any(leaf is not None and leaf.dtype == torch.float32 for leaf in leaves)
        dtype = torch.float32 if half and grown else segment.dtype
        size = segment.size
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
        segments = [self.layout.segments[index] for index in self.trained(unit)]
        flats = [self.local.pop(index) for index in self.trained(unit)]
        pending = self.carriage.reduce(segments, flats)
        if self.carriage.ranks.copies > 1 and self.carriage.knobs.stage and not self.more:
            # Replicas share what all micro-batches of theirs have given, once.
            pending = relay(pending, lambda found: self.carriage.replicate(segments, self._sum(unit, found)))
            self._under_way.append((unit, pending))
        else:
            self._under_way.append((unit, pending.then(lambda found: self._sum(unit, found))))
        for _, earlier in self._under_way if self.carriage.ranks.levels > 1 else ():
            if not earlier.poll():
                break  # later hops start in one order on all ranks

    def _settle(self) -> None:
        unit, pending = self._under_way.pop(0)
        self.sums.update(zip(self.trained(unit), pending.wait(), strict=True))

    def _sum(self, unit: int, reduced: Sequence[Tensor]) -> list[Tensor]:
        """Together with what earlier micro-batches gave."""
        return [self._added(index, value) for index, value in zip(self.trained(unit), reduced, strict=True)]

    def _added(self, index: int, value: Tensor) -> Tensor:
        if index in self.sums:
            return self.sums[index].add_(value)
        return wide(value) if self.more and value.element_size() == 2 else value

    def _learn(self) -> None:
        """From the second pass on, the order is the one in which the first rank completed the units of the first."""
        if not self.order.learned:
            agreed = self.carriage.ranks.from_first(torch.tensor(self.completed, dtype=torch.int64), "control")
            self.order.units, self.order.learned = tuple(agreed.tolist()), True
