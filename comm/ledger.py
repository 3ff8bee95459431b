"""The ledger: what each rank sent, counted from the table's volumes. Counting never synchronises with a device."""

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from torch import Tensor

from .collective import Call

if TYPE_CHECKING:
    from .group import Group

__all__ = ["Ledger", "Row", "ledger"]


@attrs.define
class Row:
    """One collective over one group.

    Attributes:
        collective: its name.
        group: the group's name, with its channel behind a slash.
        size: ranks in the group.
        calls: how often it was called; a coalesced tree is one call.
        elements: elements that this rank sent.
        bytes: bytes that this rank sent.
    """

    collective: str
    group: str
    size: int
    calls: int = 0
    elements: int = 0
    bytes: int = 0


@attrs.define
class Ledger:
    """What one rank sent while the ledger was open: a row for each collective and group, in order of first use."""

    rows: list[Row] = attrs.field(factory=list)

    def record(self, call: Call, tensors: Sequence[Tensor], group: "Group") -> None:
        """Books one call."""
        row = self._row(call.collective.name, group)
        row.calls += 1
        for tensor in tensors:
            sent = call.collective.volume(tensor.numel(), group.size, group.rank, call.options)
            row.elements += sent
            row.bytes += sent * tensor.element_size()

    def _row(self, collective: str, group: "Group") -> Row:
        for row in self.rows:
            if (row.collective, row.group, row.size) == (collective, group.name, group.size):
                return row
        self.rows.append(Row(collective, group.name, group.size))
        return self.rows[-1]

    @property
    def calls(self) -> int:
        """Collectives called, all rows together."""
        return sum(row.calls for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes this rank sent, all rows together."""
        return sum(row.bytes for row in self.rows)

    def table(self) -> str:
        """The rows as text, with a total."""
        lines = [f"{'collective':<16}{'group':<16}{'ranks':>6}{'calls':>8}{'elements':>16}{'bytes':>16}"]
        total = Row("total", "", 0, self.calls, sum(r.elements for r in self.rows), self.bytes)
        for r in [*self.rows, total]:
            ranks = str(r.size or "")
            lines.append(f"{r.collective:<16}{r.group:<16}{ranks:>6}{r.calls:>8}{r.elements:>16,}{r.bytes:>16,}")
        return "\n".join(lines)

    def to_csv(self, path: str | Path) -> None:
        """Writes the rows as CSV."""
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([a.name for a in attrs.fields(Row)])
            writer.writerows(attrs.astuple(row) for row in self.rows)


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Counts what this rank sends while the block runs, on all groups of the current world.

    >>> from functional_ds import comm
    >>> def program():
    ...     with comm.ledger() as book:
    ...         comm.all_reduce(torch.ones(6))
    ...     return book.bytes
    >>> comm.simulate(program, world_size=3)  # 2 (n - 1) / n of 24 bytes
    [32, 32, 32]
    """
    from .world import world  # the surroundings stand above the records

    books = world().world.books
    book = Ledger()
    books.append(book)
    try:
        yield book
    finally:
        books[:] = [other for other in books if other is not book]
