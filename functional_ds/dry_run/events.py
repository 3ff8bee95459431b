"""The events of a run on one rank, with values or without, and their totals."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from time import perf_counter
from typing import Any
from weakref import ref

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.torch_private import FakeTensorMode, has_values, storage_id, unset_fake_temporarily
from functional_ds.comm.debug.trace import opened
from functional_ds.comm.record.group import Ready, World
from functional_ds.comm.record.ledger import Ledger, LedgerCall, Row
from functional_ds.comm.table.collective import Handle, WatchedHandle
from functional_ds.comm.worlds.process_handle import ProcessHandle

from .operations import OperationCounter, SizedOperation, tensors_in


@attrs.frozen
class AllocationEvent:
    """Memory that a rank allocates or frees.

    Attributes:
        bytes: of a storage; negative where it is freed or shrinks.
        storage: a number, unique in the run.
        label: what the storage holds: the collective that returned it, or a given label; may be empty.
        seconds: when (``time.perf_counter``); equality ignores it.
    """

    bytes: int
    storage: int
    label: str = ""
    seconds: float = attrs.field(factory=perf_counter, eq=False, repr=False)

    def grown(self, bytes: int) -> "AllocationEvent":
        """The storage grows by so many bytes now."""
        return AllocationEvent(bytes, self.storage, self.label)


Event = AllocationEvent | SizedOperation | Row  # of one call


class Events(list[Event]):
    """The events of a run on one rank, in order, and what they add up to.

    >>> Events([AllocationEvent(8, 1), AllocationEvent(4, 2), AllocationEvent(-8, 1), AllocationEvent(6, 3)]).peak()
    12
    """

    def __repr__(self) -> str:
        return f"Events({len(self)}, peak {self.peak():,} bytes)"

    def peak(self, label: str | None = None, *, since: int = 0, until: int | None = None) -> int:
        """The peak bytes of all storages, or of those with a label; from one event on, or before one.

        Args:
            label: which.
            since: the first event; earlier allocations are counted.
            until: the end, exclusive; None for all.
        """
        now = most = 0
        for place, event in enumerate(self[:until]):
            if isinstance(event, AllocationEvent) and label in (None, event.label):
                now += event.bytes
                most = max(most, now) if place >= since else 0
        return most

    def curve(self) -> list[tuple[float, int]]:
        """The bytes of all storages over time: (time, bytes from then on) pairs, for ``comm.debug.calls_chart``."""
        allocations = [event for event in self if isinstance(event, AllocationEvent)]
        return list(
            zip((event.seconds for event in allocations), accumulate(event.bytes for event in allocations), strict=True)
        )

    @property
    def work(self) -> Counter[SizedOperation]:
        """How often each operation runs, without those that are parts of collectives."""
        return Counter(event for event in self if isinstance(event, SizedOperation))

    @property
    def flops(self) -> int:
        """The floating-point operations of products, convolutions and attention."""
        return sum(event.flops for event in self if isinstance(event, SizedOperation))

    @property
    def sent(self) -> list[Row]:
        """The rows of a ledger: for each collective and group what this rank sends, in order of first use."""
        rows: dict[Any, Row] = {}
        for event in self:
            if isinstance(event, Row):
                fresh = attrs.evolve(event, calls=0, elements=0, bytes=0, sent_to={})
                rows.setdefault((event.collective, event.group, event.ranks), fresh).add(event)
        return list(rows.values())


def row_of(made: LedgerCall) -> Row:
    """One call of a collective, as a ledger counts it."""
    book = Ledger()
    book.record(made, Ready([]), 0.0, early=False)
    return book.rows[0]


class EventRecorder(OperationCounter):
    """Records what happens inside, in order.

    A storage is recorded with the first operation that returns it, and freed when it is. Storages in ``apart`` existed before
    and do not count.

    Attributes:
        events: so far.
        world: in which some operations are parts of collectives, and not events.
    """

    def __init__(self, apart: Any = (), *, world: World | None = None) -> None:
        super().__init__()
        self.events, self.world = Events(), world
        self._lock = threading.RLock()  # threads of collectives note, too
        self._known: dict[int, tuple[ref[torch.UntypedStorage], AllocationEvent]] = {}
        self._count = 0
        self._labelled: set[int] = set()
        self._apart: dict[int, Tensor] = {}
        self.keep_apart(apart)

    def __repr__(self) -> str:
        return f"EventRecorder({self.events!r})"

    def add(self, operation: SizedOperation, result: Any) -> None:
        """An operation ran and returned this."""
        self.note(result)
        if not getattr(self.world, "communicating", False):
            self.events.append(operation)

    def note(self, held: Any, label: str = "") -> None:
        """Records existing tensors; those that were recorded before get a label."""
        with self._lock:
            for x in tensors_in(held):
                place, storage = storage_id(x), x.untyped_storage()
                if place in self._apart:
                    continue
                if place in self._known and label:
                    self._freed(place)
                if place not in self._known:
                    made = self.expect(storage.nbytes(), label)
                    self._known[place] = ref(storage, lambda _, place=place: self._freed(place)), made  # type: ignore[misc]
                    self._labelled.update([place] if label else ())

    def expect(self, size: int, label: str) -> AllocationEvent:
        """Records memory that is allocated, or expected for what is in flight."""
        with self._lock:
            self._count += 1
            made = AllocationEvent(size, self._count, label)
            self.events.append(made)
        return made

    def keep_apart(self, held: Any) -> None:
        """Excludes tensors that existed before."""
        self._apart.update((storage_id(x), x) for x in tensors_in(held))

    def allocated(self, held: Any = None) -> dict[int, int]:
        """The bytes of all existing storages, or of those of a tree, by their numbers."""
        with self._lock:
            places = self._known.keys() if held is None else {storage_id(x) for x in tensors_in(held)} & self._known.keys()
            allocations = [self._known[place][1] for place in places]
        return {made.storage: made.bytes for made in allocations}

    def _freed(self, place: int) -> None:
        with self._lock:
            _, made = self._known.pop(place)
            self._labelled.discard(place)
            self.events.append(made.grown(-made.bytes))

    def resized(self) -> None:
        """Records labelled tensors whose memory ``resize_``, which is not an operation, has freed or reallocated."""
        with self._lock:
            changes: list[AllocationEvent] = []
            for place in [*self._labelled]:
                known, made = self._known[place]
                storage = known()
                if storage is not None and storage.nbytes() != made.bytes:
                    self._known[place] = known, attrs.evolve(made, bytes=storage.nbytes())
                    changes.append(made.grown(storage.nbytes() - made.bytes))
            self.events += sorted(changes, key=lambda change: change.bytes)  # what was given back may have come first


class FakeRecorder(EventRecorder):
    """For fake tensors: tensors with values, such as a module's buffers, are excluded, as they were allocated before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unset_fake_temporarily() as fakes:
            if isinstance(fakes, FakeTensorMode):
                bare = (x for x in tensors_in((args, kwargs)) if has_values(x))
                self.keep_apart([fakes.from_tensor(x) for x in bare])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, operation: SizedOperation, result: Any) -> None:
        """An operation ran; the result of a module's bare copy has no memory."""
        super().add(operation, [x for x in tensors_in(result) if not x.is_meta])


@attrs.define(eq=False)
class _CallEvents(Ledger):
    """Records collectives among a recorder's events."""

    recorder: EventRecorder = attrs.field(kw_only=True)
    _begun: list[int] = attrs.field(factory=list)

    def record(self, made: LedgerCall, handle: Handle, began: float, *, early: bool) -> Handle:
        """As a ledger does, with the same arguments."""
        row = row_of(made)
        self.recorder.resized()
        self.recorder.events.append(row)
        label = "" if made.group.endswith("/control") else row.collective
        if isinstance(handle, Ready):
            self.recorder.note(handle.results, label)
            return handle
        size = sum(x.nbytes for x in made.tensors) * (made.here.n if row.traffic.of_result else 1)
        began_with = handle
        while isinstance(began_with, WatchedHandle):
            began_with = began_with.inner
        noted = isinstance(began_with, ProcessHandle)  # it allocated its results when it began, by recorded operations
        under_way = [self.recorder.expect(0 if noted else size, label)]

        def arrives(wait: Callable[[], list[Tensor]]) -> list[Tensor]:
            results = wait()
            self.recorder.events += [made.grown(-made.bytes) for made in under_way]
            under_way.clear()
            self.recorder.note(results, label)
            return results

        return WatchedHandle(handle, arrives)

    def snapshot(self) -> list[Row]:
        """Before what is repeated."""
        self._begun.append(len(self.recorder.events))
        return []

    def multiply(self, before: Sequence[Row], times: int) -> None:
        """Repeats what was computed and sent since."""
        body = [event for event in self.recorder.events[self._begun.pop() :] if not isinstance(event, AllocationEvent)]
        self.recorder.events += body * (times - 1)


@contextmanager
def recorded(*held: Any, apart: Any = ()) -> Iterator[EventRecorder]:
    """Records the events of the block on this rank, beginning with the allocation of ``held``.

    Args:
        held: trees of tensors.
        apart: tensors that do not count, such as the caller's.

    >>> with recorded(torch.ones(4)) as run:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 5)
    >>> run.events.flops, run.events.peak()  # of the operations' arguments and results
    (60, 140)
    """
    recorder = EventRecorder(apart, world=comm.world().world)
    recorder.note(held)
    with opened(_CallEvents(recorder=recorder)), recorder:
        yield recorder
