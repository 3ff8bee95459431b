"""HTML tables and text, for notebooks."""

from collections.abc import Iterable
from html import escape


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
