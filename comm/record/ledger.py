"""The ledger: counts what a rank sends, by the volumes in the table of collectives, and optionally measures times.

Counting does not synchronize with a device; measuring times does.
"""

import csv
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from time import perf_counter

import attrs
from torch import Tensor

from functional_ds.base.device import synchronize
from functional_ds.comm.table.collective import Call, CallContext, Handle, Traffic, WatchedHandle

_OVERLAP = 0.1  # of a call's time: if its rank did other work for longer, its time does not measure the transfer


@attrs.define
class Row:
    """The totals of one collective over one group.

    Attributes:
        collective: its name.
        group: the group's name; for a channel, followed by a slash and its name.
        size: the number of ranks in the group.
        calls: the number of calls; a pytree is one call.
        elements: elements that this rank sent.
        bytes: bytes that this rank sent.
        ranks: the group's ranks.
        timed: the number of timed calls: under ``ledger(times=True)``, those that were waited for.
        overlapped: of these, the asynchronous calls during which this rank did other work for more than a tenth of their time.
            Bandwidths exclude them, since their time is not that of the transfer.
        seconds: the total time of the timed calls, including the wait for the last rank, or for a message's other end.
        sent_to: bytes that went to particular ranks of the world, as messages do; the rest went to all others equally.
        payload: bytes of the timed calls' values: the output of a gather, the input of any other collective.
        overlapped_seconds, overlapped_payload: those of the overlapped calls.
        traffic: the load on links.
        rank: this rank, of the world.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     with comm.ledger() as sent:
    ...         comm.all_gather(torch.ones(3))
    ...     return sent.rows
    >>> comm.simulate(program, world_size=3)[0]
    [Row(collective='all_gather', group='world', size=3, calls=1, elements=6, bytes=24)]
    """

    collective: str
    group: str
    size: int
    calls: int = 0
    elements: int = 0
    bytes: int = 0
    ranks: tuple[int, ...] = attrs.field(default=(), repr=False, eq=False)
    sent_to: dict[int, int] = attrs.field(factory=dict, repr=False, eq=False)
    timed: int = attrs.field(default=0, repr=False, eq=False)
    seconds: float = attrs.field(default=0.0, repr=False, eq=False)
    payload: int = attrs.field(default=0, repr=False, eq=False)
    overlapped: int = attrs.field(default=0, repr=False, eq=False)
    overlapped_seconds: float = attrs.field(default=0.0, repr=False, eq=False)
    overlapped_payload: int = attrs.field(default=0, repr=False, eq=False)
    traffic: Traffic = attrs.field(default=Traffic(), repr=False, eq=False)
    rank: int = attrs.field(default=0, repr=False, eq=False)

    def leaving(self, ranks_per_node: int) -> float:
        """Bytes that this rank sent to other nodes, with so many consecutive ranks of the world on each.

        >>> from functional_ds import comm
        >>> def program():
        ...     with comm.ledger() as sent:
        ...         comm.all_reduce(torch.ones(8))
        ...     return sent.rows[0].leaving(2)
        >>> [comm.simulate(program, world_size=4, ranks_per_node=known)[0] for known in (1, 2)]
        [32.0, 16.0]
        """
        far = [rank for rank in self.ranks if rank // ranks_per_node != self.rank // ranks_per_node]
        equally = self.bytes - sum(self.sent_to.values())
        return sum(self.sent_to.get(rank, 0) for rank in far) + equally * len(far) / max(1, self.size - 1)

    def count(self, elements: int, size: int) -> None:
        """Adds a call that sent ``elements`` elements, of ``size`` bytes in all."""
        self.calls += 1
        self.elements += elements
        self.bytes += size

    def add(self, other: "Row", times: int = 1) -> None:
        """Adds another row's calls, so many times."""
        self.calls += other.calls * times
        self.elements += other.elements * times
        self.bytes += other.bytes * times
        for rank, sent in other.sent_to.items():
            self.sent_to[rank] = self.sent_to.get(rank, 0) + sent * times

    def time(self, event: "Event") -> None:
        """Adds a timed call's time, and the bytes of its values."""
        self.timed += 1
        self.seconds += event.seconds
        self.payload += event.payload
        if event.overlapped:
            self.overlapped += 1
            self.overlapped_seconds += event.seconds
            self.overlapped_payload += event.payload

    @property
    def algorithmic_bandwidth(self) -> float | None:
        """Bytes of the values per second, in calls that were timed and not overlapped; None if there are none."""
        seconds = self.seconds - self.overlapped_seconds if self.timed > self.overlapped else 0.0
        return (self.payload - self.overlapped_payload) / seconds if seconds > 0 else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second on the busiest link for an optimal algorithm, as nccl-tests defines it.

        2 (n - 1) / n times the algorithmic bandwidth for all-reduces; (n - 1) / n for gathers, scatters, reduce-scatters and
        all-to-alls; 1 for the others.
        """
        return None if self.algorithmic_bandwidth is None else self.algorithmic_bandwidth * self.traffic.bus(self.size)


@attrs.frozen
class Event:
    """A timed call.

    Attributes:
        collective: its name.
        group: the group's name.
        began: its start (``time.perf_counter``).
        ended: its end.
        elements: elements that this rank sent.
        bytes: bytes that this rank sent.
        payload: bytes of its values, as in ``Row``.
        overlapped: whether this rank did other work meanwhile, as in ``Row``.
        ranks: the group's ranks.
        traffic: the load on links.
        order: the key of its sequence of calls (``Collective.order``).
    """

    collective: str
    group: str
    began: float
    ended: float
    elements: int
    bytes: int
    payload: int
    overlapped: bool
    ranks: tuple[int, ...] = attrs.field(repr=False)
    traffic: Traffic = attrs.field(repr=False)
    order: Hashable = attrs.field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """The time from its start to its end."""
        return self.ended - self.began


RowsBySize = dict[tuple[str, str, tuple[int, ...], int], Row]


def add_by_size(rows: RowsBySize, events: Iterable[Event]) -> None:
    """Adds timed calls to rows by collective, group, ranks and size of their values."""
    for event in events:
        fresh = Row(event.collective, event.group, len(event.ranks), ranks=event.ranks, traffic=event.traffic)
        row = rows.setdefault((event.collective, event.group, event.ranks, event.payload), fresh)
        row.count(event.elements, event.bytes)
        row.time(event)


@attrs.frozen(eq=False)
class LedgerCall:
    """A call to record in a ledger.

    Attributes:
        call: the collective and its options.
        tensors: this rank's values.
        here: the options, this rank's place in the group, and its size.
        group: the group's name.
        ranks: the group's ranks.
    """

    call: Call
    tensors: Sequence[Tensor]
    here: CallContext
    group: str
    ranks: tuple[int, ...]


def _synchronize(tensors: Sequence[Tensor]) -> None:
    synchronize(tensor.device for tensor in tensors)


def begin(ledgers: "Sequence[Ledger]", tensors: Sequence[Tensor]) -> float:
    """The start time of a call; if a ledger measures times, waits for the device's earlier work first."""
    if ledgers and any(ledger.times for ledger in ledgers):
        _synchronize(tensors)
    return perf_counter()


@attrs.define
class Ledger:
    """What a rank sent while the ledger was open, as a row for each collective and group, in order of first use.

    Attributes:
        rank: the rank.
        times: whether it measures times.
        rows: the totals.
        events: the timed calls, in the order in which they were waited for.
    """

    rank: int = 0
    times: bool = False
    rows: list[Row] = attrs.field(factory=list)
    events: list[Event] = attrs.field(factory=list, repr=False)
    _found: dict[tuple[str, str, tuple[int, ...]], Row] = attrs.field(factory=dict, repr=False, eq=False)

    def record(self, made: LedgerCall, handle: Handle, began: float, *, early: bool) -> Handle:
        """Records a call; returns the handle to wait for.

        Args:
            made: the call.
            handle: the started call.
            began: when it started.
            early: whether the caller continues before it waits.
        """
        call, here, ranks = made.call, made.here, made.ranks
        row = self._row(call.title(here.rank)[0], made.group, ranks, call.collective.traffic)
        row.rank = ranks[here.rank]
        payload = elements = bytes_sent = 0
        for tensor in made.tensors:
            sent, size = call.collective.volume(tensor, here), tensor.element_size()
            elements += sent
            bytes_sent += sent * size
            payload += tensor.numel() * size
        row.count(elements, bytes_sent)
        shares = (call.collective.shares(here) if bytes_sent else None) or {}
        whole = sum(shares.values())
        for peer, part in shares.items():
            row.sent_to[ranks[peer]] = row.sent_to.get(ranks[peer], 0) + bytes_sent * part // whole
        if not self.times:
            return handle
        payload *= here.n if row.traffic.of_result else 1
        order, started = call.collective.order(call.options), perf_counter()

        def timed(wait: Callable[[], list[Tensor]]) -> list[Tensor]:
            meanwhile = perf_counter() - started
            results = wait()
            _synchronize(results)
            ended = handle.ended or perf_counter()
            overlapped = early and meanwhile > _OVERLAP * (ended - began)
            sizes = elements, bytes_sent, payload
            event = Event(row.collective, made.group, began, ended, *sizes, overlapped, ranks, row.traffic, order)
            row.time(event)
            self.events.append(event)
            return results

        return WatchedHandle(handle, timed)

    def _row(self, collective: str, group: str, ranks: tuple[int, ...], traffic: Traffic) -> Row:
        key = (collective, group, ranks)
        row = self._found.get(key)
        if row is None:
            row = self._found[key] = Row(collective, group, len(ranks), ranks=ranks, traffic=traffic)
            self.rows.append(row)
        return row

    def snapshot(self) -> list[Row]:
        """The rows so far."""
        return [attrs.evolve(row, sent_to={**row.sent_to}) for row in self.rows]

    def multiply(self, before: Sequence[Row], times: int) -> None:
        """Counts the calls since the snapshot ``times`` times."""
        new = [Row("", "", 0)] * (len(self.rows) - len(before))
        for row, old in zip(self.rows, [*before, *new], strict=True):
            row.add(row, times - 1)
            row.add(old, 1 - times)

    def by_size(self) -> list[Row]:
        """The timed calls as a row for each collective, group and size of its values, in order of first use.

        ``row.payload / row.calls`` is the size in bytes, which nccl-tests calls the message size.

        >>> from functional_ds import comm
        >>> def program():
        ...     with comm.ledger(times=True) as book:
        ...         for count in (2, 8, 2):
        ...             comm.all_gather(torch.ones(count))
        ...     return [(row.collective, row.calls, row.payload // row.calls) for row in book.by_size()]
        >>> comm.simulate(program, world_size=3)[0]
        [('all_gather', 2, 24), ('all_gather', 1, 96)]
        """
        rows: RowsBySize = {}
        add_by_size(rows, self.events)
        return list(rows.values())

    @property
    def calls(self) -> int:
        """The number of calls, over all rows."""
        return sum(row.calls for row in self.rows)

    @property
    def elements(self) -> int:
        """Elements that this rank sent, over all rows."""
        return sum(row.elements for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent, over all rows."""
        return sum(row.bytes for row in self.rows)

    def _repr_html_(self) -> str:
        from .notebook import html_table

        total = Row("total", "", 0, self.calls, self.elements, self.bytes)
        rows = [
            (r.collective, r.group, r.size or "", r.calls, f"{r.elements:,}", f"{r.bytes:,}")
            + ((f"{r.seconds * 1e3:.3f}" if r.timed else "",) if self.times else ())
            for r in [*self.rows, total]
        ]
        head = ["collective", "group", "ranks", "calls", "elements", "bytes", *(["ms"] if self.times else [])]
        return html_table(head, rows, caption=f"sent by rank {self.rank}")

    def table(self) -> str:
        """The rows as text, with a total; with times, seconds and bandwidths in GB/s (1e9 bytes)."""
        head = f"{'collective':<16}{'group':<16}{'ranks':>6}{'calls':>8}{'elements':>16}{'bytes':>16}"
        lines = [head + (f"{'ms':>12}{'alg GB/s':>10}{'bus GB/s':>10}" if self.times else "")]
        total = Row("total", "", 0, self.calls, self.elements, self.bytes)
        for r in [*self.rows, total]:
            line = f"{r.collective:<16}{r.group:<16}{r.size or ''!s:>6}{r.calls:>8}{r.elements:>16,}{r.bytes:>16,}"
            if self.times and r is not total:
                rates = (r.algorithmic_bandwidth, r.bus_bandwidth)
                line += f"{r.seconds * 1e3:>12.3f}" + "".join(f"{rate / 1e9:>10.3f}" if rate else f"{'':>10}" for rate in rates)
            lines.append(line)
        return "\n".join(lines)

    def to_csv(self, path: str | Path) -> None:
        """Writes the rows as CSV; sizes in bytes, times in seconds."""
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            names = [field.name for field in attrs.fields(Row) if field.name not in ("sent_to", "traffic", "rank")]
            writer.writerow([*names, "algorithmic_bandwidth", "bus_bandwidth"])
            for row in self.rows:
                values = {**attrs.asdict(row), "ranks": " ".join(map(str, row.ranks))}
                writer.writerow([*(values[name] for name in names), row.algorithmic_bandwidth, row.bus_bandwidth])
