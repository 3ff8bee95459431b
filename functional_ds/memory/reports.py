"""Tables and plots of bytes by category. The plots need matplotlib, from the extra ``train``."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from functional_ds.base.package_index import new_figure

from .account import Memory
from .formulas import SIXTEEN, Convention, Formula, by_stage

_STATE = ("params", "masters", "optimizer")


def zero_table(psi: float = 7.5e9, n: int = 64, *, convention: Convention = SIXTEEN) -> str:
    """A table of each rank's memory in ZeRO's stages, in GB of 10⁹ bytes; by default the numbers of the paper's figure 1.

    Args:
        psi: the number of parameters.
        n: the number of ranks.
        convention: how many bytes of each kind a parameter takes.

    >>> print(zero_table())
    Ψ = 7.5e+09 parameters on n = 64 ranks; GB on each rank
    16 bytes: half params and gradients, fp32 masters, Adam's two moments
    stage     params   masters optimizer gradients     total  formula
    0          15.00     30.00     60.00     15.00    120.00  16Ψ
    1          15.00      0.47      0.94     15.00     31.41  4Ψ + 12Ψ/n
    2          15.00      0.47      0.94      0.23     16.64  2Ψ + 14Ψ/n
    3           0.23      0.47      0.94      0.23      1.88  16Ψ/n

    Raises:
        ValueError: no parameters or no ranks.
    """
    kinds = tuple(by_stage(0))
    head = f"{'stage':<6}" + "".join(f"{category:>10}" for category in (*kinds, "total")) + "  formula"
    lines = [f"Ψ = {psi:g} parameters on n = {n} ranks; GB on each rank", convention.name, head]
    for stage in range(4):
        formulas = by_stage(stage, convention)
        whole = sum(formulas.values(), Formula())
        cells = "".join(f"{formula.bytes(psi, n) / 1e9:>10.2f}" for formula in (*formulas.values(), whole))
        lines.append(f"{stage:<6}{cells}  {whole}")
    return "\n".join(lines)


def compared(title: str, expected: Mapping[str, Formula], psi: int, ranks: Sequence[Memory]) -> str:
    """A table of formulas against measured memory: for each category its formula, predicted bytes and each rank's bytes.

    Args:
        title: the first line.
        expected: the formula of each kind, from ``by_stage`` for example.
        psi: the number of parameters.
        ranks: every rank's memory, from ``Memory.of_all_ranks``.

    >>> from functional_ds.memory import SINGLE, by_stage
    >>> measured = Memory(params=400, optimizer=800, gradients=400)
    >>> print(compared("Adam in fp32", by_stage(0, SINGLE), 100, [measured]))
    Adam in fp32
    Ψ = 100 parameters on n = 1 ranks; bytes on each rank
    <BLANKLINE>
                                formula           bytes          rank 0
    params                           4Ψ             400             400
    masters                           0               0               0
    optimizer                        8Ψ             800             800
    state, these three              12Ψ           1,200           1,200
    gradients                        4Ψ             400             400
    state and gradients             16Ψ           1,600           1,600
    """
    n = len(ranks)
    rows: list[tuple[str, tuple[str, ...]]] = [(category, (category,)) for category in _STATE]
    rows += [("state, these three", _STATE), ("gradients", ("gradients",)), ("state and gradients", (*_STATE, "gradients"))]
    lines = [
        f"{title}\nΨ = {psi:,} parameters on n = {n} ranks; bytes on each rank\n",
        f"{'':<22}{'formula':>13}{'bytes':>16}" + "".join(f"{f'rank {i}':>16}" for i in range(n)),
    ]
    for label, kinds in rows:
        formula = sum((expected[category] for category in kinds), Formula())
        cells = "".join(f"{sum(getattr(rank, category) for category in kinds):>16,}" for rank in ranks)
        lines.append(f"{label:<22}{formula!s:>13}{formula.bytes(psi, n):>16,.0f}{cells}")
    if any(rank.peak for rank in ranks):
        lines.append(f"{'peak of the process':<51}" + "".join(f"{rank.peak:>16,}" for rank in ranks))
    return "\n".join(lines)


if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COLOURS = {"params": "#4c72b0", "masters": "#55a868", "optimizer": "#c44e52", "gradients": "#ccb974"}


def draw_zero(psi: float = 7.5e9, n: int = 64, *, convention: Convention = SIXTEEN) -> "Figure":
    """Plots ``zero_table``: a stacked bar for each stage.

    Args:
        psi: Ψ, how many parameters.
        n: how many ranks.
        convention: the optimizer's bytes for each parameter.
    """
    figure = new_figure(7, 4.5, needs="pictures need")
    axes = figure.subplots()
    table = [by_stage(stage, convention) for stage in range(4)]
    names = [f"stage {stage}" for stage in range(4)]
    heights = {category: [row[category].bytes(psi, n) / 1e9 for row in table] for category in _COLOURS}
    tops = _stack(axes, names, heights, {category: category for category in _COLOURS})
    for place, (top, row) in enumerate(zip(tops, table, strict=True)):
        axes.annotate(f"{top:.1f}\n{sum(row.values(), Formula())}", (place, top), ha="center", va="bottom")
    axes.set_ylim(0, 1.2 * max(tops))
    axes.set_ylabel("GB on each rank")
    axes.set_title(f"Ψ = {psi:g} parameters on n = {n} ranks\n{convention.name}")
    axes.legend(frameon=False)
    return figure


def draw_compared(title: str, expected: Mapping[str, Formula], psi: int, ranks: Sequence[Memory]) -> "Figure":
    """Plots ``compared``: stacked bars for the formula and for each rank, and each rank's peak.

    Args:
        title: of the plot.
        expected: the formulas, by category.
        psi: Ψ, how many parameters.
        ranks: each rank's memory, in rank order.
    """
    figure = new_figure(11, 4.5, needs="pictures need")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    names = ["formula", *(f"rank {i}" for i in range(len(ranks)))]
    heights = {
        category: [expected[category].bytes(psi, len(ranks)) / 1e6, *(getattr(rank, category) / 1e6 for rank in ranks)]
        for category in _COLOURS
    }
    tops = _stack(left, names, heights, {category: f"{category} ({expected[category]})" for category in _COLOURS})
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


def _stack(axes: Any, names: Sequence[str], heights: Mapping[str, Sequence[float]], labels: Mapping[str, str]) -> list[float]:
    """Draws stacked bars and returns their total heights."""
    floors = [0.0] * len(names)
    for category, row in heights.items():
        if any(row):
            axes.bar(names, row, 0.6, bottom=floors, color=_COLOURS[category], label=labels[category])
        floors = [floor + height for floor, height in zip(floors, row, strict=True)]
    return floors
