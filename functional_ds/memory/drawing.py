"""Bytes as pictures; needs matplotlib, the extra ``train``."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .account import Memory
from .formulas import SIXTEEN, Convention, Formula, by_stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_compared", "draw_zero"]

_COLOURS = {"params": "#4c72b0", "masters": "#55a868", "optimizer": "#c44e52", "gradients": "#ccb974"}


def draw_zero(psi: float = 7.5e9, n: int = 64, *, convention: Convention = SIXTEEN) -> "Figure":
    """``zero_table`` as stacked bars, a stage each."""
    figure = _figure(7, 4.5)
    axes = figure.subplots()
    table = [by_stage(stage, convention) for stage in range(4)]
    names = [f"stage {stage}" for stage in range(4)]
    heights = {kind: [row[kind].bytes(psi, n) / 1e9 for row in table] for kind in _COLOURS}
    tops = _stack(axes, names, heights, {kind: kind for kind in _COLOURS})
    for place, (top, row) in enumerate(zip(tops, table, strict=True)):
        axes.annotate(f"{top:.1f}\n{sum(row.values(), Formula())}", (place, top), ha="center", va="bottom")
    axes.set_ylim(0, 1.2 * max(tops))
    axes.set_ylabel("GB on each rank")
    axes.set_title(f"Ψ = {psi:g} parameters on n = {n} ranks\n{convention.name}")
    axes.legend(frameon=False)
    return figure


def draw_compared(title: str, expected: Mapping[str, Formula], psi: int, ranks: Sequence[Memory]) -> "Figure":
    """``compared`` as stacked bars, the formula's beside each rank's; and the peaks."""
    figure = _figure(11, 4.5)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    names = ["formula", *(f"rank {i}" for i in range(len(ranks)))]
    heights = {
        kind: [expected[kind].bytes(psi, len(ranks)) / 1e6, *(getattr(rank, kind) / 1e6 for rank in ranks)] for kind in _COLOURS
    }
    tops = _stack(left, names, heights, {kind: f"{kind} ({expected[kind]})" for kind in _COLOURS})
    left.set_title(f"state and gradients, Ψ = {psi:,}")
    left.set_ylim(0, 1.45 * max(tops))  # room for the legend
    left.legend(loc="upper right", ncols=2, frameon=False)
    right.bar(names[1:], [rank.peak / 1e6 for rank in ranks], 0.6, color="#8c9bb0")
    right.set_title("peak of the process")
    for axes in (left, right):
        axes.set_ylabel("MB")
        axes.tick_params(axis="x", rotation=0 if len(names) < 6 else 90)
    figure.suptitle(title)
    return figure


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'functional-ds[train]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _stack(axes: Any, names: Sequence[str], heights: Mapping[str, Sequence[float]], labels: Mapping[str, str]) -> list[float]:
    """Bars on top of each other; the heights of all."""
    floors = [0.0] * len(names)
    for kind, row in heights.items():
        if any(row):
            axes.bar(names, row, 0.6, bottom=floors, color=_COLOURS[kind], label=labels[kind])
        floors = [floor + height for floor, height in zip(floors, row, strict=True)]
    return floors
