"""Plots a graph: computation and collectives over predicted time, with memory below."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from os import PathLike
from typing import Any

from functional_ds.base.package_index import new_figure

from .graph_cost import COMPUTE, GraphCost, InMemory, NodeSpan

# As in the pictures of pipelines and of ZeRO's units: blue forwards, teal backwards, orange reductions.
_PHASES = {"forward": "#4c72b0", "backward": "#2a8b8b", "update": "#55a868"}
_GATHER, _REDUCE, _OTHER, _WAITING, _INK = "#b6c7e3", "#dd8452", "#8c8c8c", "#d9d9d9", "#333333"
_COLOURS = {"gather": _GATHER, "reduction": _REDUCE}  # by role
_NAMES = {_GATHER: "gathers", _REDUCE: "reductions", _WAITING: "waits for communication"}
_INCHES = 11.0
_LETTER = 0.062  # inches of a letter of the labels


def draw_cost(cost: GraphCost, path: str | PathLike[str] | None = None, *, title: str = "") -> Any:
    """Plots a lane for the device's computation, by phase, one for each channel, and below them the memory.

    Args:
        cost: what is plotted.
        path: a file to write; the suffix is the format: .svg, .png, .pdf.
        title: the figure's title; by default the step's time and its breakdown.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed (the extra ``train``).
    """
    scale, unit = _unit(cost.seconds)
    lanes = [COMPUTE, *dict.fromkeys(span.lane for span in cost.spans if span.lane != COMPUTE)]
    rows = {"lanes": 0.46 * len(lanes) + 0.3, "bytes": 1.2}
    rows |= {"units": 0.5} if any(now.units for _, now in cost.memory) else {}
    figure = new_figure(_INCHES, 1.3 + sum(rows.values()), needs="draw needs", instead="print(graph.cost(...))")
    below = figure.subplots(len(rows), sharex=True, height_ratios=list(rows.values()))
    used = _lanes(below[0], cost, lanes, scale)
    _bytes(below[1], cost, scale)
    if "units" in rows:
        _units(below[2], cost, scale)
    below[-1].set(xlim=(0, cost.seconds * scale or 1), xlabel=f"predicted time ({unit})")
    figure.legend(handles=used, loc="outside lower center", ncols=len(used), fontsize=8, frameon=False)
    figure.suptitle(title or _title(cost, scale, unit), fontsize=10)
    if path is not None:
        figure.savefig(path)
    return figure


def _unit(seconds: float) -> tuple[float, str]:
    return next(((scale, unit) for scale, unit in ((1.0, "s"), (1e3, "ms")) if seconds * scale >= 1), (1e6, "µs"))


def _title(cost: GraphCost, scale: float, unit: str) -> str:
    parts = {"computes": cost.compute, "waits for communication": sum(cost.exposed.values()), "waits for the host": cost.host}
    shown = ", ".join(f"{name} {seconds * scale:.3g}" for name, seconds in parts.items() if seconds)
    return f"a step of {cost.seconds * scale:.3g} {unit}: {shown}"


def _lanes(axes: Any, cost: GraphCost, lanes: Sequence[str], scale: float) -> list[Any]:
    """Bars of all lanes; gives the legend."""
    from matplotlib.patches import Patch

    inches = (_INCHES - 1.6) / (cost.seconds * scale or 1)
    colours: dict[str, str] = {}

    def bars(
        row: int,
        intervals: Iterable[tuple[float, float]],
        colour: str,
        height: float = 0.8,
        edge: str = "white",
        wide: float = 0.5,
    ) -> None:
        spans = [(begin * scale, (end - begin) * scale) for begin, end in intervals]
        axes.broken_barh(spans, (row - height / 2, height), facecolor=colour, edgecolor=edge, linewidth=wide)

    computing = [span for span in cost.spans if span.lane == COMPUTE]
    for phase, spans in groupby(computing, key=lambda span: span.phase):
        run = list(spans)
        colour = _PHASES.get(phase, _OTHER)
        colours.setdefault(colour, phase if phase in _PHASES else "other phases")
        bars(0, _joined(run), colour, edge="none")
    waits = [(wait.begin, wait.end) for wait in cost.waits]
    bars(0, waits, _WAITING, 0.3, edge="none")
    critical = {span.node for span in cost.critical_path}
    for row, lane in enumerate(lanes[1:], 1):
        for span in (span for span in cost.spans if span.lane == lane):
            colour = _COLOURS.get(span.role, _OTHER)
            colours.setdefault(colour, _NAMES.get(colour, "other collectives"))
            bars(row, [(span.begin, span.end)], colour, edge=_INK if span.node in critical else "white", wide=0.9)
            label = span.does.partition(" of ")[2].strip("'")
            if label and span.seconds * scale * inches > len(label) * _LETTER:
                middle = (span.begin + span.end) / 2 * scale
                axes.text(middle, row, label, ha="center", va="center", fontsize=7, color=_INK)
    if waits:
        colours[_WAITING] = _NAMES[_WAITING]
    axes.set(ylim=(len(lanes) - 0.4, -0.75))
    axes.set_yticks(range(len(lanes)), lanes, fontsize=9)
    axes.tick_params(left=False, bottom=False)
    for side in axes.spines.values():
        side.set_visible(False)
    _phase_names(axes, computing, scale, inches)
    order = [*_PHASES.values(), _OTHER, _GATHER, _REDUCE, _WAITING]
    patches = [Patch(color=colour, label=colours[colour]) for colour in sorted(colours, key=order.index)]
    return [*patches, Patch(facecolor="white", edgecolor=_INK, linewidth=0.8, label="on the critical path")]


def _joined(spans: Sequence[NodeSpan]) -> list[tuple[float, float]]:
    """Joins adjacent spans into one bar."""
    bars: list[tuple[float, float]] = []
    for span in spans:
        if bars and span.begin <= bars[-1][1]:
            bars[-1] = bars[-1][0], max(span.end, bars[-1][1])
        else:
            bars.append((span.begin, span.end))
    return bars


def _phase_names(axes: Any, computing: Sequence[NodeSpan], scale: float, inches: float) -> None:
    """Labels above the compute lane, if they fit."""
    for phase, spans in groupby(computing, key=lambda span: span.phase):
        run = list(spans)
        begin, end = run[0].begin * scale, run[-1].end * scale
        if phase and (end - begin) * inches > len(phase) * _LETTER * 1.2:
            axes.text((begin + end) / 2, -0.55, phase, ha="center", va="center", fontsize=8, color=_INK)


def _steps(cost: GraphCost, scale: float) -> tuple[list[float], list[InMemory]]:
    """Memory over time, as steps."""
    return [time * scale for time, _ in cost.memory] + [cost.seconds * scale], [
        *(now for _, now in cost.memory),
        cost.memory[-1][1],
    ]


def _bytes(axes: Any, cost: GraphCost, scale: float) -> None:
    times, held = _steps(cost, scale)
    most = max(now.bytes for now in held)
    size, unit = next(((size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= size), (1.0, "bytes"))
    axes.fill_between(times, [now.bytes / size for now in held], step="post", color="#e4eaf5", linewidth=0)
    axes.step(times, [now.bytes / size for now in held], where="post", color="#4c72b0", linewidth=1)
    axes.set_ylim(0, 1.12 * most / size or 1)
    axes.set_ylabel(f"memory besides\nthe state ({unit})", fontsize=8.5)
    _open(axes)


def _units(axes: Any, cost: GraphCost, scale: float) -> None:
    times, held = _steps(cost, scale)
    most = max(now.units for now in held)
    axes.fill_between(times, [now.units for now in held], step="post", color=_GATHER, linewidth=0)
    axes.set_ylim(0, most + 0.3)
    axes.set_yticks([0, most])
    axes.set_ylabel("gathered\nunits", fontsize=8.5)
    _open(axes)


def _open(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
