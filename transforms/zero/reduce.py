"""Reduces each unit's gradients as soon as they are complete, in the same order on all ranks."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, islice, repeat, starmap
from operator import or_

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.torch_private import foreach_add_, foreach_copy_
from functional_ds.comm.worlds.current import recorder
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.segment import Segment
from functional_ds.step.views.view import dense, wide

from .collectives import Collectives
from .units.prefetch import FetchPlan

_MAX_IN_FLIGHT = 2  # each reduction in flight holds a whole unit's gradients


@attrs.define(eq=False)
class ReduceOrder:
    """The order in which all ranks reduce units.

    Attributes:
        units: first the reverse of the layout's order; after the first pass, the order in which rank 0 completed them.
        traced: whether rank 0's order is known.
        timeout_s: how long a rank waits for a reduction before it starts a third; 0 after a timeout that did not help.
        plan: the fetches of a backward pass for which the ranks agreed on ``after``.
        after: unit -> how many of these fetches all ranks start before the unit's reduction.
        nested: units that got gradients from nested backward passes on any rank. They are reduced twice.
    """

    units: tuple[int, ...]
    traced: bool = False
    timeout_s: float = 2.0
    plan: FetchPlan | None = None
    after: Mapping[int, int] = attrs.field(factory=dict)
    nested: tuple[int, ...] = ()


@attrs.define(eq=False)
class Reducer:
    """Takes the gradients of units as a backward pass completes them, and returns those of the stored leaves.

    A segment's gradients are first summed on this rank (``local``: over its uses and, in stages 0 and 1, over earlier
    micro-batches), then over the ranks, then onto ``sums`` (in stages 2 and 3, the shards of earlier micro-batches).

    Law: every rank reduces every unit once, in ``order``, in whichever order it completes them.

    Gathers and reductions use separate groups, and NCCL may block if ranks launch them in different orders. So in a pass with
    planned fetches, the ranks agree after how many fetches each unit was complete on all ranks; if the next pass has the same
    plan, they start the unit's reduction there.

    Attributes:
        layout: the units.
        collectives: reduces a unit.
        order: in which order.
        now: whether this pass reduces over the ranks; otherwise the sums stay local.
        more: whether further micro-batches will be added to the result.
        local: this rank's sums, ``[segment.size]``, by segment.
        sums: sums over the ranks, ``[segment.shard]``, by segment.
    """

    layout: Layout
    collectives: Collectives
    order: ReduceOrder
    now: bool
    more: bool
    local: dict[int, Tensor]
    sums: dict[int, Tensor]
    _nested: set[int] = attrs.field(factory=set)
    _used: dict[int, list[bool]] = attrs.field(factory=dict)  # segment -> whether each leaf has got a gradient
    _posted: int = 0
    _plan: FetchPlan | None = None
    _made: int = 0  # fetches of the plan so far
    _completed_after: dict[int, int] = attrs.field(factory=dict)  # unit -> fetches made, in the order of completion
    _own: "deque[tuple[int, comm.Pending[list[Tensor]]]]" = attrs.field(factory=deque)  # reductions in flight

    def has(self, unit: int) -> bool:
        """Whether the unit is complete."""
        return unit in self._completed_after

    def add(self, unit: int, grads: Sequence[Tensor | None], device: torch.device) -> None:
        """Adds the gradients of a unit's backward node, which completes it.

        Args:
            unit: whose.
            grads: of the unit's trained leaves, in layout order; None, or an empty list, means zeros.
            device: of the sums.
        """
        if len(self._own) >= _MAX_IN_FLIGHT and self._next() == unit:
            self._limit_in_flight()  # before its gradients are packed, since it starts at once
        self._add(unit, grads, device)
        self._completed_after[unit] = self._made
        self._post()

    def fetched(self, plan: FetchPlan, made: int) -> None:
        """Records the number of the pass's planned fetches so far."""
        self._plan, self._made = plan, made
        self._post()

    @property
    def out_of_place(self) -> bool:
        """Whether this rank completed a unit after the place that the ranks agreed on."""
        return self._placed and any(made > self.order.after[unit] for unit, made in self._completed_after.items())

    def add_nested(self, unit: int, grads: Sequence[Tensor | None], device: torch.device) -> None:
        """Adds gradients of a nested backward pass, which come after the unit was complete.

        Args:
            unit: whose.
            grads: as for ``add``.
            device: of the sums.

        Raises:
            RuntimeError: no rank had any in the first pass, so the other ranks would not join another reduction.
        """
        if self.now and self.order.traced and unit not in self.order.nested:
            paths = [self.layout.paths[leaf] for leaf in self.layout.units[unit].trained_leaves]
            raise RuntimeError(
                "the backward pass of a custom autograd.Function ran another backward pass, which gave the params "
                f"{paths} gradients. In the first step none did, and the ranks agreed then on what they sum: use "
                "the Function in the first step, too, or torch.utils.checkpoint with use_reentrant=False in its place"
            )
        self._nested.add(unit)
        self._add(unit, grads, device)

    def finish(self, *, renew: bool = False) -> list[Tensor]:
        """All gradients, one per trained segment, after the last reduction; ``renew`` means that a rank was late."""
        results = self.local
        if self.now:
            self._settle_all()
            self._trace_order(renew)
            for unit in self.order.nested:
                if unit not in self._nested:
                    self._add(unit, (), self.sums[self.layout.units[unit].trained_segments[0]].device)
                self._start(unit, again=True)
            self._settle_all()
            results = self.sums
        return [results[index] for index, segment in enumerate(self.layout.segments) if segment.trainable]

    def unused(self) -> list[int]:
        """The places of the leaves without a gradient in this pass, in the order of the leaf map."""
        segments = [(index, segment.leaves) for index, segment in enumerate(self.layout.segments) if segment.trainable]
        rows = [(leaves, self._used.get(index) or [False] * len(leaves)) for index, leaves in segments]
        if all(all(flags) for _, flags in rows):
            return []
        used = dict(chain.from_iterable(zip(leaves, flags, strict=True) for leaves, flags in rows))
        return [place for place, leaf in enumerate(sorted(used)) if not used[leaf]]

    # -- on this rank --------------------------------------------------------------------------------------------------

    def _add(self, unit: int, grads: Sequence[Tensor | None], device: torch.device) -> None:
        remaining = chain(grads, repeat(None))
        for index in self.layout.units[unit].trained_segments:
            self._accumulate(index, [*islice(remaining, len(self.layout.segments[index].slots))], device)

    def _accumulate(self, index: int, leaves: Sequence[Tensor | None], device: torch.device) -> None:
        segment = self.layout.segments[index]
        leaves = [x if x is None or x.layout is torch.strided else dense(x) for x in leaves]
        used = [leaf is not None for leaf in leaves]
        before = self._used.get(index)
        self._used[index] = used if before is None else list(map(or_, before, used))
        fresh = index not in self.local
        if fresh:
            dtype = self._dtype(segment, leaves)
            packed = segment.packed(leaves, dtype, device, self.collectives.pool)
            if packed is not None:
                self.local[index] = packed
                return
            covered = all(used) and not any(segment.gaps)
            self.local[index] = (torch.empty if covered else torch.zeros)(segment.size, dtype=dtype, device=device)
        pairs = zip(segment.views(self.local[index]), leaves, strict=True)
        present = [(view, grad) for view, grad in pairs if grad is not None and grad.numel()]
        if present:
            move = foreach_copy_ if fresh else foreach_add_
            move([view for view, _ in present], [grad for _, grad in present])

    def _dtype(self, segment: Segment, leaves: Sequence[Tensor | None]) -> torch.dtype:
        """The dtype of a segment's gradients: fp32 for half-precision sums over micro-batches."""
        half = segment.dtype in (torch.float16, torch.bfloat16)
        grows = half and (not self.now or any(leaf is not None and leaf.dtype == torch.float32 for leaf in leaves))
        return torch.float32 if grows else segment.dtype

    # -- over the ranks ------------------------------------------------------------------------------------------------

    def _post(self) -> None:
        """Starts the reductions of completed units whose turn it is."""
        while (unit := self._next()) is not None and unit in self._completed_after:
            self._posted += 1
            self._limit_in_flight()
            self._start(unit)

    @property
    def _placed(self) -> bool:
        return self._plan is not None and self.order.plan is self._plan

    def _next(self) -> int | None:
        """The unit to reduce next; None if there is none, or it has another place."""
        turns = self.order.units if self.now else ()
        if self._posted >= len(turns):
            return None
        unit = turns[self._posted]
        return unit if not self._placed or self._made >= self.order.after[unit] else None

    def _limit_in_flight(self) -> None:
        """Waits until fewer than two reductions are in flight, up to a timeout, which avoids a deadlock.

        If ranks use units in different orders, the rank that has to join the oldest reduction may wait for a gather that this
        rank has not reached. After the timeout a third reduction starts, at the cost of its memory.
        """
        while len(self._own) >= _MAX_IN_FLIGHT:
            if not self._own[0][1].poll(self.order.timeout_s):
                self.order.timeout_s = 0.0
                return
            self._settle()

    def _start(self, unit: int, *, again: bool = False) -> None:
        """Starts the reduction of this rank's sums; ``again`` adds it to what was reduced before."""
        trained, collectives = self.layout.units[unit].trained_segments, self.collectives
        segments, flats = [*map(self.layout.segments.__getitem__, trained)], [*map(self.local.pop, trained)]

        def summed(sums: Sequence[Tensor]) -> list[Tensor]:
            return [*starmap(self._with_earlier, zip(trained, sums, strict=True))]

        if collectives.alone(segments[0]):
            self.sums.update(zip(trained, summed([*map(collectives.to_comm_dtype, flats)]), strict=True))
            return
        with recorder().labelled(self.layout.units[unit].name):
            pending = collectives.reduce(segments, flats)
        if self.more:  # replicas sum once a step, over all micro-batches
            pending = pending.then(summed)
        elif again:
            pending = collectives.replicate(segments, pending, list, flats[0].device).then(summed)
        else:
            pending = collectives.replicate(segments, pending, summed, flats[0].device)
        self._own.append((unit, pending))

    def _settle_all(self) -> None:
        while self._own:
            self._settle()

    def _settle(self) -> None:
        unit, pending = self._own.popleft()
        self.sums.update(zip(self.layout.units[unit].trained_segments, pending.wait(), strict=True))

    def _with_earlier(self, index: int, value: Tensor) -> Tensor:
        """Adds the shards of earlier micro-batches."""
        if index in self.sums:
            return self.sums[index].add_(value)
        return wide(value) if self.more and value.element_size() == 2 else value

    def _trace_order(self, renew: bool) -> None:
        """From the second pass on, all ranks reduce in the order in which rank 0 completed the units of the first.

        They also agree on which units got gradients of nested passes on any rank.
        """
        order, groups = self.order, self.collectives.groups
        device = groups.shards.channel("control").world.device
        if not order.traced:
            agreed = groups.broadcast(torch.tensor([*self._completed_after], dtype=torch.int64, device=device), "control")
            mine = torch.tensor([unit in self._nested for unit in agreed.tolist()], dtype=torch.int64, device=device)
            nested = groups.any_rank(mine)
            order.units, order.traced, order.nested = tuple(agreed.tolist()), True, tuple(agreed[nested > 0].tolist())
        if self._plan is not None and (renew or not self._placed):
            mine = torch.tensor([self._completed_after[unit] for unit in order.units], device=device)
            latest = comm.all_reduce(mine, groups.shards.channel("control"), op="max")
            # A unit's turn comes after the turns of those before it.
            order.plan, order.after = self._plan, dict(zip(order.units, accumulate(latest.tolist(), max), strict=True))
