"""Figures of what pages print and list: the gallery's tables, and the cheat sheet; ``make.py`` writes them.

The gallery's programs print the tables, which a picture shows again: it is redrawn from the page, not from another run.
"""

import html
import re
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1]
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8c8c8c")


def printed(program: str) -> list[list[str]]:
    """The cells of the table that docs/gallery.md shows for a program; the first line is the head."""
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    block = page.partition(f"`examples/research/{program}.py` prints:\n\n```text\n")[2].partition("\n```")[0]
    return [re.split(r"\s{2,}", line.strip()) for line in block.splitlines()]


# -- loss against bytes ------------------------------------------------------------------------------------------------


def gallery_bytes() -> Figure:
    """Loss against bytes: ways to compress gradients, and DiLoCo, beside plain data parallelism."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    for axes, program in zip(figure.subplots(1, 2), ("compression", "diloco"), strict=True):
        (title, *_), *rows = printed(program)
        plain = float(rows[0][1])
        for index, (name, loss, sent) in enumerate(rows):
            x, y = int(sent.replace(",", "")) / 1e6, float(loss)
            axes.plot(x, y, "o", color=COLOURS[min(index, 1)])
            place: dict[str, Any] = {"xytext": (7, 2)} if index else {"xytext": (0, -14), "ha": "center"}
            axes.annotate(f"{name}: {loss}", (x, y), textcoords="offset points", fontsize=8, **place)
        axes.axhline(plain, color=COLOURS[-1], linestyle=":", linewidth=1)
        axes.set(xscale="log", xlabel="MB that a rank sends in the run", ylabel="validation loss")
        axes.margins(0.24, 0.17)
        _plain_ticks(axes)
        axes.set_title(
            f"{'Compressed gradients' if program == 'compression' else 'DiLoCo, meeting every H steps'}: {title}", fontsize=9
        )
    return figure


def _plain_ticks(axes: Axes) -> None:
    low, high = axes.get_xlim()
    ticks = [tick for tick in (0.2, 0.5, 1, 2, 5, 10, 20) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)


# -- learning rates under muP ------------------------------------------------------------------------------------------


def gallery_mup() -> Figure:
    """Loss against the learning rate at three widths, in both parametrisations; a star at each width's best."""
    head, *rows = printed("mup")
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    powers = [int(row[0].removeprefix("2^")) for row in rows]
    for column, name in enumerate(head[1:], start=1):
        kind, _, width = name.partition(" ")
        axes, colour = panels[int(kind == "muP")], COLOURS[(column - 1) % 3]
        losses = [float(row[column].rstrip("*")) for row in rows]
        best = min(range(len(rows)), key=lambda place: losses[place])
        axes.plot(powers, losses, "-", color=colour, label=f"width {width}: best {losses[best]:.3f} at {rows[best][0]}")
        axes.plot(powers[best], losses[best], "*", color=colour, markersize=11)
        axes.set(xlabel="learning rate", ylim=(2.4, 4.4))
        axes.set_title("standard parametrisation" if kind == "standard" else "maximal update parametrisation (muP)", fontsize=9)
    for axes in panels:
        axes.set_xticks(powers, [row[0] for row in rows], fontsize=8)
        axes.legend(fontsize=8, loc="upper center")
    panels[0].set_ylabel("validation loss")
    return figure


# -- the cheat sheet ---------------------------------------------------------------------------------------------------

_LINE, _LEFT, _WIDE = 16, 250, 1020  # pixels


def cheat_sheet() -> str:
    """The tables of docs/cheat-sheet.md as one SVG picture, code in a fixed-width font."""
    text, lines, y = (DOCS / "cheat-sheet.md").read_text(encoding="utf-8").partition("## Glossary")[0], [], 8
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if line.startswith("**"):
            y += _LINE + 8
            lines.append(f'<text x="12" y="{y}" class="head">{_spans(line.replace("**", ""))}</text>')
        elif len(cells) == 4 and cells[1].strip("-"):
            y += _LINE
            lines += [f'<text x="{x}" y="{y}">{_spans(cell)}</text>' for x, cell in ((12, cells[1]), (_LEFT, cells[2]))]
    style = "text { font: 11px sans-serif } .head { font-weight: bold } .code { font: 10.5px monospace; fill: #20508c }"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {y + 14}" width="{_WIDE}" height="{y + 14}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="white"/>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def _spans(cell: str) -> str:
    """Markdown of a cell as SVG: links without their targets, code in its class."""
    parts = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", cell).split("`")
    return "".join(
        f'<tspan class="code">{html.escape(part)}</tspan>' if place % 2 else html.escape(part)
        for place, part in enumerate(parts)
    )
