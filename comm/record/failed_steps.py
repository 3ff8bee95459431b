"""Handles steps that raise after some of their collectives: ranks may continue only if all of them failed at the same call.

If a step raises on all ranks, they may try another. If it raises on one rank, the others are still in its collectives, and the
calls of that rank's next step would match those of the failed one: a deadlock, or wrong values.
"""

import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import get_ident
from time import monotonic, sleep

import attrs
from torch.distributed.distributed_c10d import Store

from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.errors import CommError

from .group import Group

_PATIENCE = 10.0  # seconds within which the other ranks' steps must have failed, too
_PAUSE = 5e-3  # seconds between two requests to the store


@attrs.frozen
class _FailedStep:
    """A failed step: its error, how many calls of each order this rank had made, and each order's members."""

    error: str
    calls: dict[tuple[Hashable, ...], int]
    members: dict[tuple[Hashable, ...], tuple[int, ...]]

    def like(self, other: "_FailedStep", here: int, there: int) -> bool:
        """Whether two ranks had made the same number of calls in the orders that they share."""
        orders = [order for order, ranks in {**self.members, **other.members}.items() if here in ranks and there in ranks]
        return all(self.calls.get(order) == other.calls.get(order) for order in orders)


@attrs.define(eq=False)
class FailedSteps:
    """One rank's record of failed steps. Nothing is sent unless a step fails.

    Attributes:
        rank: this rank of the world.
        store: the key-value store that all ranks share.
        break_off: makes the other ranks' waits for this rank fail.
        patience: seconds within which the other ranks' steps must have failed, too.
    """

    rank: int
    store: Store
    break_off: Callable[[], None]
    patience: float = _PATIENCE
    _thread: int = -1  # the thread of the last step; lanes finish what it has begun
    _running: _FailedStep | None = None  # the current step, as if it failed now
    _failed: _FailedStep | None = None
    _alike: int = 0  # how many steps have failed on all ranks
    _refused: str = ""  # why this rank cannot continue

    @contextmanager
    def step(self) -> Iterator[None]:
        """Runs a step inside the block; if it raises after it has called collectives, tells the other ranks."""
        if self._running is not None:
            yield
            return
        self._thread, self._running = get_ident(), _FailedStep("", {}, {})
        try:
            yield
        except Exception as error:
            if self._running.calls and self._failed is None:
                self._failed = attrs.evolve(self._running, error=f"{type(error).__name__}: {error}")
                with suppress(Exception):  # the store may be gone with the process that held it
                    self.store.set(self._key(self.rank), pickle.dumps(attrs.astuple(self._failed, recurse=False)))  # type: ignore[arg-type]
            raise
        finally:
            self._running = None

    def before(self, call: Call, group: Group) -> None:
        """Counts a call; the first one after a failed step waits until the other ranks' steps have failed, too.

        Raises:
            CommError: they have not failed, or at another call.
        """
        if get_ident() != self._thread:
            return
        if self._failed is not None:
            self._agree(self._failed)
        if self._running is not None:
            order = (group.ranks, group.name, call.collective.order(call.options))
            calls = self._running.calls
            if order not in calls:
                members = call.collective.members(call.options, group.size)
                self._running.members[order] = tuple(group.ranks[member] for member in members)
            calls[order] = calls.get(order, 0) + 1

    def told(self, ranks: Iterable[int]) -> str:
        """Which of these ranks' steps have failed, a line for each."""
        failed = []
        with suppress(Exception):
            failed = [
                (rank, self._of(rank).error) for rank in ranks if rank != self.rank and self.store.check([self._key(rank)])
            ]
        return "".join(f"\na step of rank {rank} has failed: {error}" for rank, error in failed)

    def _agree(self, mine: _FailedStep) -> None:
        if not self._refused:
            others = sorted({rank for ranks in mine.members.values() for rank in ranks} - {self.rank})
            try:
                self._refused = self._difference(mine, others)
            except RuntimeError as error:  # from torch: the process that held the store has ended
                self._refused = (
                    f"the last step of rank {self.rank} failed ({mine.error}), and rank 0 or its parent ended: {error}"
                )
            if self._refused:
                self.break_off()
        if self._refused:
            raise CommError(self._refused)
        self._failed = None
        self._alike += 1
        if self._alike > 1:  # all ranks have read the entries before the last
            self.store.delete_key(self._key(self.rank, self._alike - 2))

    def _difference(self, mine: _FailedStep, others: list[int]) -> str:
        """Why this rank cannot continue; empty if all ranks have failed at the same call."""
        calls = sum(mine.calls.values())
        begun = f"the last step of rank {self.rank} failed within its collectives (after {calls} calls): {mine.error}"
        would_do = "such an error must end the program, or be raised on all ranks; then resume from a checkpoint"
        deadline = monotonic() + self.patience
        while missing := [rank for rank in others if not self.store.check([self._key(rank)])]:
            if monotonic() > deadline:
                listed = ", ".join(map(str, missing))
                return f"{begun}\nrank {listed} had not failed within {self.patience:g} s, and waits in that step; {would_do}"
            sleep(_PAUSE)
        for rank in others:
            theirs = self._of(rank)
            if not mine.like(theirs, self.rank, rank):
                calls = sum(theirs.calls.values())
                return f"{begun}\nthat of rank {rank} failed elsewhere (after {calls} calls): {theirs.error}; {would_do}"
        return ""

    def _of(self, rank: int) -> _FailedStep:
        return _FailedStep(*pickle.loads(self.store.get(self._key(rank))))

    def _key(self, rank: int, alike: int | None = None) -> str:
        return f"functional_ds/failed {self._alike if alike is None else alike} {rank}"
