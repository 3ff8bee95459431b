"""Combines the ledgers of all ranks: the slowest rank of each collective, and a trace of all calls."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from functional_ds.comm.record.ledger import Event, Ledger
from functional_ds.comm.worlds.current import world


@contextmanager
def ledger(*, times: bool = False) -> Iterator[Ledger]:
    """Records what this rank sends inside the block, on all groups of the current world.

    Args:
        times: also measure each call from start to end. On CUDA the host then synchronizes before and after each call.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     with comm.ledger() as sent:
    ...         comm.all_reduce(torch.ones(6))
    ...     return sent.bytes
    >>> comm.simulate(program, world_size=3)  # 2 (n - 1) / n of 24 bytes
    [32, 32, 32]
    """
    book = Ledger(world().rank, times)
    with opened(book):
        yield book


@contextmanager
def opened(book: Ledger) -> Iterator[None]:
    """Makes a ledger record inside the block."""
    ledgers = world().world.ledgers
    ledgers.append(book)
    try:
        yield
    finally:
        ledgers[:] = [other for other in ledgers if other is not book]


@attrs.frozen
class Spread:
    """The time that each rank of a group spent in one collective.

    Attributes:
        collective: its name.
        group: the group's name.
        ranks: the group's ranks.
        seconds: each rank's time, in the order of ``ranks``.
        slowest: the rank that the others waited for, which spent the least time in the collective.
    """

    collective: str
    group: str
    ranks: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def slowest(self) -> int:
        return self.ranks[min(range(len(self.ranks)), key=self.seconds.__getitem__)]

    def __str__(self) -> str:
        low, high = min(self.seconds) * 1e3, max(self.seconds) * 1e3
        return (
            f"{self.collective:<16}{self.group:<16}{len(self.ranks):>6}{low:>12.3f}{high:>12.3f}"
            f"   waited for rank {self.slowest}"
        )


def spreads(ledgers: Sequence[Ledger]) -> list[Spread]:
    """The ranks' times in each collective of each group, from their timed ledgers; prints as lines in milliseconds.

    ``ledgers`` are those of all ranks of a world, in any order: the results of ``simulate`` or ``spawn``, or, under torchrun,
    ``comm.all_gather_object(sent)``. Collectives that some rank did not time, or overlapped with other work, are omitted.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     with comm.ledger(times=True) as sent:
    ...         comm.all_reduce(torch.ones(6))
    ...     return sent
    >>> [(spread.collective, spread.ranks) for spread in spreads(comm.simulate(program, world_size=2))]
    [('all_reduce', (0, 1))]
    """
    seconds: dict[tuple[str, str, tuple[int, ...]], dict[int, float]] = {}
    for one in ledgers:
        for row in one.rows:
            if row.timed and not row.overlapped:
                seconds.setdefault((row.collective, row.group, row.ranks), {})[one.rank] = row.seconds
    return [
        Spread(collective, group, ranks, tuple(by_rank[rank] for rank in ranks))
        for (collective, group, ranks), by_rank in seconds.items()
        if all(rank in by_rank for rank in ranks)
    ]


def write_trace(ledgers: Sequence[Ledger], path: str | Path, *, offsets: Sequence[float] | None = None) -> None:
    """Writes the ranks' timed calls as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

    Each rank is a process of the trace, each group a thread, and each call a slice with the bytes that the rank sent.

    Args:
        ledgers: the ranks' ledgers.
        path: the file.
        offsets: added to each rank's times: ``comm.debug.clock_offsets().seconds``. None if all ranks share a clock, as on one
            host.

    Raises:
        ValueError: no ledger has times; open them with ``ledger(times=True)``.

    >>> import json, tempfile, torch
    >>> from functional_ds import comm
    >>> def program():
    ...     with comm.ledger(times=True) as sent:
    ...         comm.all_reduce(torch.ones(6))
    ...     return sent
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_trace(comm.simulate(program, world_size=2), f"{folder}/trace.json")
    ...     events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    >>> [event["name"] for event in events if event["ph"] == "X"]
    ['all_reduce', 'all_reduce']
    """
    if not any(one.events for one in ledgers):
        raise ValueError("ledgers: no ledger has times; open them with comm.ledger(times=True)")
    write_slices({one.rank: slices_of(one.events) for one in ledgers}, path, offsets=offsets)


@attrs.frozen
class Slice:
    """A span of a rank's time: its lane, name, start and end in seconds, and further properties."""

    lane: str
    name: str
    began: float
    ended: float
    more: Mapping[str, object] = attrs.field(factory=dict)


def slices_of(events: Iterable[Event]) -> list[Slice]:
    """Timed calls as slices, in the lanes of their groups."""
    return [Slice(event.group, event.collective, event.began, event.ended, {"bytes sent": event.bytes}) for event in events]


def write_slices(
    slices: Mapping[int, Sequence[Slice]], path: str | Path, *, offsets: Mapping[int, float] | Sequence[float] | None = None
) -> None:
    """Writes ranks' slices as a Chrome trace, with a process for each rank and a thread for each lane.

    Args:
        slices: by rank; at least one.
        path: the file.
        offsets: added to each rank's times, by rank; None if all ranks share a clock.
    """
    ahead = {rank: 0.0 if offsets is None else offsets[rank] for rank in slices}
    start = min(slice_.began + ahead[rank] for rank, of_rank in slices.items() for slice_ in of_rank)
    events: list[dict[str, object]] = []
    for rank, of_rank in slices.items():
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        lanes: dict[str, int] = {}
        for slice_ in of_rank:
            events.append(
                {
                    "ph": "X",
                    "name": slice_.name,
                    "cat": slice_.lane,
                    "pid": rank,
                    "tid": lanes.setdefault(slice_.lane, len(lanes)),
                    "ts": (slice_.began + ahead[rank] - start) * 1e6,  # microseconds
                    "dur": (slice_.ended - slice_.began) * 1e6,
                    "args": dict(slice_.more),
                }
            )
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}} for name, lane in lanes.items()
        ]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
