"""HTML tables and text, for notebooks, and progress bars."""

import sys
from collections.abc import Iterable
from html import escape
from typing import Any


def html_table(head: Iterable[object], rows: Iterable[Iterable[object]], *, caption: str = "") -> str:
    """An HTML table; cells are converted with ``str`` and escaped.

    >>> html_table(["a"], [["<1>"]])
    '<table><tr><th>a</th></tr><tr><td>&lt;1&gt;</td></tr></table>'
    """

    def line(cells: Iterable[object], tag: str) -> str:
        return "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells)

    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    lines = [line(head, "th"), *(line(row, "td") for row in rows)]
    return f"<table>{told}{''.join(f'<tr>{cells}</tr>' for cells in lines if cells)}</table>"


def html_text(text: object) -> str:
    """Preformatted text as HTML."""
    return f"<pre>{escape(str(text))}</pre>"


def progress_bar(steps: Iterable[Any] | None = None, *, total: int | None = None, done: int = 0, shown: bool = True) -> Any:
    """A bar of tqdm's that counts steps: a widget in a notebook with ipywidgets, else a line of text on stderr.

    It moves every 0.1 s, and in files every 10 s.

    Args:
        steps: what the bar iterates over; None for ``bar.update()``.
        total: the number of steps; None for that of ``steps``, or if it is open.
        done: the number of earlier steps.
        shown: whether it is shown at all.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    moves = sys.stderr.isatty() or "ipykernel.zmqshell" in sys.modules
    pause = 0.1 if moves else 10.0
    return tqdm(steps, total=total, initial=done, disable=not shown, unit="step", dynamic_ncols=True, mininterval=pause)
