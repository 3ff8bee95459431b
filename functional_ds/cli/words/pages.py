"""What commands print: tables and paragraphs as data; JSON, plain text, or rich's tables on a terminal."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

_NUMBER = re.compile(r"^(-|[\d.,e+]*( [a-zA-Z]+)?)$")
_WIDTH = 160  # of plain cells, after which they are cut


@attrs.frozen
class OutputTable:
    """A table with a title; cells of numbers are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]


Page = Sequence["OutputTable | str"]


def emit(page: Page, data: Any, *, as_json: bool) -> None:
    """Prints data as JSON, or the page: with rich on a terminal, else as plain text."""
    if as_json:
        text = json.dumps(data, indent=1, ensure_ascii=False, default=str)
        shown = text if printable(text) == text else json.dumps(data, indent=1, default=str)
        sys.stdout.write(shown + "\n")
    elif sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        _rich(page)
    else:
        sys.stdout.write(printable(plain(page)) + "\n")


def printable(text: str) -> str:
    """The text with an escape for each character that the terminal's encoding does not have; names in files may have any."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


def plain(page: Page) -> str:
    """The page without colours, boxes or a fixed width.

    >>> print(plain([OutputTable("sizes", ("what", "bytes"), [("params", "16"), ("buffers", "4")])]))
    sizes
      what     bytes
      params      16
      buffers      4
    """
    return "\n\n".join(_plain_table(part) if isinstance(part, OutputTable) else part for part in page)


def _plain_table(table: OutputTable) -> str:
    rows = [tuple(cell[:_WIDTH] for cell in row) for row in table.rows]
    columns = list(zip(table.columns, *rows, strict=True)) if rows else [(name,) for name in table.columns]
    widths, right = [max(map(len, column)) for column in columns], _numeric(table)
    lines = [table.title] if table.title else []
    for row in [table.columns, *rows] if any(table.columns) else rows:
        cells = [cell.rjust(n) if r else cell.ljust(n) for cell, n, r in zip(row, widths, right, strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _numeric(table: OutputTable) -> list[bool]:
    columns = list(zip(*table.rows, strict=True)) if table.rows else [()] * len(table.columns)
    return [bool(column) and all(_NUMBER.match(cell) for cell in column) for column in columns]


def _rich(page: Page) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for part in page:
        if isinstance(part, str):
            console.print(Text(printable(part)))
            continue
        table = Table(title=part.title or None, title_justify="left", show_header=any(part.columns), header_style="bold cyan")
        for name, right in zip(part.columns, _numeric(part), strict=True):
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in part.rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print(table)


def bytes_of(count: float) -> str:
    """Bytes with a unit of 10^3.

    >>> bytes_of(999), bytes_of(81_604_378_624)
    ('999 B', '81.60 GB')
    """
    return _in_units(count, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}, ".2f") or f"{count:.0f} B"


def count_of(number: float) -> str:
    """A count with a unit.

    >>> count_of(7_453_609_984), count_of(12)
    ('7.45 G', '12')
    """
    return _in_units(number, {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}) or f"{number:g}"


def seconds_of(time: float | None) -> str:
    """Seconds with a unit; a dash where it is unknown.

    >>> seconds_of(0.0123), seconds_of(None)
    ('12.3 ms', '-')
    """
    return "-" if time is None else _in_units(time, {"s": 1.0, "ms": 1e-3}) or f"{time / 1e-6:.3g} us"


def _in_units(number: float, units: Mapping[str, float], form: str = ".3g") -> str | None:
    """In the first unit of which there is at least one."""
    return next((f"{number / factor:{form}} {unit}" for unit, factor in units.items() if number >= factor), None)
