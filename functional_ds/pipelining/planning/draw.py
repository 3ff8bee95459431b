"""``draw``: plots timelines as Gantt charts with memory below."""

import math
from os import PathLike
from typing import Any

from functional_ds.base.package_index import new_figure
from functional_ds.pipelining.schedules.action import Kind

from .timeline import Timeline

# The literature's colours: blue forwards, teal and green backwards.
_COLOURS = {Kind.F: "#4c72b0", Kind.I: "#64b5cd", Kind.W: "#55a868", Kind.B: "#2a8b8b"}
_NAMES = {Kind.F: "forward", Kind.I: "backward for inputs", Kind.W: "backward for weights", Kind.B: "backward"}
_WAITING = "#bbbbbb"
_LABELLED = 600  # with more actions than this, a picture has no room for their numbers
_MEMORY_LINES = 8


def draw(
    timeline: Timeline, path: str | PathLike[str] | None = None, *, beside: Timeline | None = None, title: str = ""
) -> Any:
    """Plots a Gantt chart: a line for each rank with its actions in colours, and below it each rank's memory over time.

    Args:
        timeline: what is plotted.
        path: a file to write; the suffix is the format: .svg, .png, .pdf.
        beside: a second timeline on the same scale, such as a run's, for comparison with its prediction.
        title: the figure's title.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed (the extra ``train``).
    """
    shown = [timeline] if beside is None else [timeline, beside]
    ranks = max(panel.schedule.ranks for panel in shown)
    height = 1.6 + min(12.0, 0.32 * ranks) + 1.8
    figure = new_figure(12 if len(shown) == 1 else 18, height, needs="draw needs", instead="print(timeline)")
    ratios = [min(12.0, 0.32 * ranks) + 0.6, 1.8]
    axes = figure.subplots(2, len(shown), sharex=True, squeeze=False, height_ratios=ratios)
    for column, (panel, name) in enumerate(zip(shown, ("predicted", "measured") if beside else ("",), strict=True)):
        _gantt(axes[0][column], panel)
        _memory(axes[1][column], panel)
        head = f"makespan {panel.makespan:.4g}, bubble {panel.bubble:.1%}, peak memory {max(panel.peak):.4g}"
        axes[0][column].set_title(f"{name}: {head}" if name else head, fontsize=10)
    axes[0][0].set_xlim(0, max(panel.makespan for panel in shown) or 1)  # all share it
    used = [kind for kind in _COLOURS if any(panel.schedule.has(kind) for panel in shown)]
    handles = [_patch(_COLOURS[kind], _NAMES[kind]) for kind in used]
    handles += [_patch(_WAITING, "waiting")] if any(map(any, (panel.waits for panel in shown))) else []
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    if title:
        figure.suptitle(title)
    if path is not None:
        figure.savefig(path)
    return figure


def _patch(colour: str, name: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=name)


def _gantt(axes: Any, timeline: Timeline) -> None:
    schedule = timeline.schedule
    chunks = {stage: chunk for rank in range(schedule.ranks) for chunk, stage in enumerate(schedule.stages_of(rank))}
    most = max(chunks.values())
    numbers = sum(map(len, schedule.codes)) <= _LABELLED
    for rank in range(schedule.ranks):
        waited = [wait for wait in timeline.waits[rank] if wait.start >= 0] if timeline.waits else []
        bars = [(wait.start, wait.end - wait.start) for wait in waited]
        axes.broken_barh(bars, (rank - 0.08, 0.16), facecolor=_WAITING)
        for kind, colour in _COLOURS.items():
            for chunk in range(most + 1):
                spans = [s for s in timeline.spans(rank) if s.action.kind is kind and chunks[s.action.stage] == chunk]
                bars = [(span.start, span.end - span.start) for span in spans]
                alpha = 1 - 0.45 * chunk / max(most, 1)  # later chunks are paler
                axes.broken_barh(bars, (rank - 0.45, 0.9), facecolor=colour, alpha=alpha, edgecolor="white", linewidth=0.4)
                for span in spans if numbers else ():
                    middle = (span.start + span.end) / 2
                    axes.text(middle, rank, span.action.microbatch, ha="center", va="center", fontsize=6, color="white")
    axes.set(ylim=(schedule.ranks - 0.4, -0.6), ylabel="rank")
    axes.set_yticks(range(0, schedule.ranks, max(1, schedule.ranks // 16)))


def _memory(axes: Any, timeline: Timeline) -> None:
    ranks = timeline.schedule.ranks
    for rank in range(0, ranks, max(1, math.ceil(ranks / _MEMORY_LINES))):
        times, held = timeline.memory(rank)
        axes.step(times, held, where="post", linewidth=1, label=f"rank {rank}")
    axes.set(ylabel="activations", xlabel="time", ylim=(0, None))
    axes.legend(fontsize=7, ncols=4, loc="lower center")
