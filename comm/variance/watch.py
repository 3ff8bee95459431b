"""The watch of a simulated rank, which records its declarations and traces its operations."""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor

from functional_ds.base.torch_private import has_values
from functional_ds.comm.record.group import Group, call_site
from functional_ds.comm.table.collective import Call, Handle, Variance, WatchedHandle
from functional_ds.comm.table.errors import VarianceError

from .declarations import Claim, Declarations
from .follow import contradictions
from .op_trace import OpTrace


@attrs.define(eq=False)
class RankWatch:
    """Checks one rank's declarations; implements ``ValueWatch``.

    Attributes:
        rank: the rank of the world.
        declarations: the declarations of all ranks.
        trace: the operations of this rank.
        counts: the numbers of declarations and gradients that this rank has reached, by group and declaration.
    """

    rank: int
    declarations: Declarations
    trace: OpTrace = attrs.field(factory=OpTrace)
    counts: Counter[Hashable] = attrs.field(factory=Counter)

    def start(
        self, call: Call, leaves: Sequence[Tensor], group: Group, begin: Callable[[], Handle], transposed: str | None
    ) -> Handle:
        """Starts a collective and traces it."""
        event = self.trace.call(call, leaves, group, transposed)
        with self.trace.paused():
            handle = begin()

        def followed(wait: Callable[[], list[Tensor]]) -> list[Tensor]:
            results = wait()
            self.trace.give(event, results)
            return results

        return WatchedHandle(handle, followed, self.trace.paused)

    def declare(
        self, variance: Variance, leaves: Sequence[Tensor], group: Group, names: Sequence[str], *, distinct: bool = False
    ) -> None:
        """Records a declaration, to be compared once all ranks have reached it, and likewise its gradients."""
        if not all(map(has_values, leaves)):  # a trial run without values
            return
        site = call_site()
        self.trace.declare(variance, leaves, group, gradient=False, site=site)
        if variance is Variance.VARYING and not distinct:  # nothing to compare
            return
        turn = self._turn((group.ranks, group.name))
        with self.trace.paused():
            copies = [leaf.detach().clone() for leaf in leaves]
            self.declarations.reach(turn, self.rank, Claim(variance, group, names, copies, site, self.trace.index, distinct))
        if variance is Variance.VARYING or not torch.is_grad_enabled():
            return
        for place, leaf in enumerate(leaves):
            if leaf.requires_grad:
                claim = Claim(variance, group, (names[place],), (), site, 0, gradient=True)
                leaf.register_hook(self._gradient_of((*turn, place), claim))

    def _gradient_of(self, key: tuple[Hashable, ...], claim: Claim) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            with self.trace.paused():
                cloned = grad.clone()  # autograd may use one tensor for the gradients of several values
            self.trace.declare(claim.variance, [cloned], claim.group, gradient=True, site=claim.site)
            if claim.variance.dual.equal:
                with self.trace.paused():
                    declared = attrs.evolve(claim, leaves=[grad.detach().clone()], index=self.trace.index)
                    self.declarations.reach(self._turn(key), self.rank, declared)
            return cloned

        return hook

    def _turn(self, key: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
        self.counts[key] += 1
        return (*key, self.counts[key])


@attrs.define(eq=False)
class Watches:
    """The watches of all ranks of a simulation."""

    declarations: Declarations = attrs.field(factory=Declarations)
    ranks: dict[int, RankWatch] = attrs.field(factory=dict)

    def of(self, rank: int) -> RankWatch:
        """Makes a rank's watch."""
        self.ranks[rank] = RankWatch(rank, self.declarations)
        return self.ranks[rank]

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Makes Python collect garbage more rarely inside the block, since traces grow by many objects that are kept."""
        often, *rest = gc.get_threshold()
        gc.set_threshold(often * 100, *rest)
        try:
            yield
        finally:
            gc.set_threshold(often, *rest)

    def check(self, failure: BaseException | None) -> None:
        """Reports the first contradiction, once the ranks have ended; a failure gets it as a note.

        Raises:
            VarianceError: names the first contradiction.
        """
        declared = self.declarations.all_found(ended=failure is None)
        with self.keeping():
            followed = contradictions([self.ranks[rank].trace for rank in sorted(self.ranks)])
        worded = [fault for fault in (*declared, *followed) if fault.text]
        if not worded:
            return
        first = min(worded, key=lambda fault: (fault.index, fault.rank))
        since = next((fault.since for fault in followed if fault.since and fault.index == first.index), "")
        text = f"{first.text}; they differ since {since}" if since else first.text
        if failure is None:
            raise VarianceError(text)
        failure.add_note(f"values were not what they were declared to be before that: {text}")
