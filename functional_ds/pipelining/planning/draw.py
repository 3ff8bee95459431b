"""Timelines as pictures: Gantt charts with memory under them, and text for a terminal."""

import math
from os import PathLike
from typing import Any

import numpy as np

from functional_ds.pipelining.schedules.action import Kind

from .timeline import Timeline

__all__ = ["draw", "text"]

# The literature's colours: blue forwards, teal and green backwards.
_COLOURS = {Kind.F: "#4c72b0", Kind.I: "#64b5cd", Kind.W: "#55a868", Kind.B: "#2a8b8b"}
_NAMES = {Kind.F: "forward", Kind.I: "backward for inputs", Kind.W: "backward for weights", Kind.B: "backward"}
_LABELLED = 600  # more actions than that in a picture, and their numbers cannot be read
_MEMORY_LINES = 8


def draw(
    timeline: Timeline, path: str | PathLike[str] | None = None, *, beside: Timeline | None = None, title: str = ""
) -> Any:
    """A Gantt picture: a line for each rank, its actions in colours, and below it the ranks' memory over time.

    Args:
        timeline: what is drawn.
        path: where to write it; the suffix says how: .svg, .png, .pdf.
        beside: a second one on the same scale of time, a run's beside its prediction.
        title: above it.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed (the extra ``train``).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("draw needs matplotlib: pip install 'functional-ds[train]'; text(timeline) does without") from error
    shown = [timeline] if beside is None else [timeline, beside]
    ranks = max(each.schedule.ranks for each in shown)
    height = 1.6 + min(12.0, 0.32 * ranks) + 1.8
    figure = Figure(figsize=(12 if len(shown) == 1 else 18, height), layout="constrained")
    ratios = [min(12.0, 0.32 * ranks) + 0.6, 1.8]
    axes = figure.subplots(2, len(shown), sharex=True, squeeze=False, height_ratios=ratios)
    for column, (each, name) in enumerate(zip(shown, ("predicted", "measured") if beside else ("",), strict=True)):
        _gantt(axes[0][column], each)
        _memory(axes[1][column], each)
        head = f"makespan {each.makespan:.4g}, bubble {each.bubble:.1%}, peak memory {max(each.peak):.4g}"
        axes[0][column].set_title(f"{name}: {head}" if name else head, fontsize=10)
    axes[0][0].set_xlim(0, max(each.makespan for each in shown) or 1)  # all share it
    used = [kind for kind in _COLOURS if any(each.schedule.has(kind) for each in shown)]
    handles = [_patch(_COLOURS[kind], _NAMES[kind]) for kind in used]
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


def text(timeline: Timeline, *, width: int = 100) -> str:
    """A line for each rank, time from left to right: each action's kind and micro-batch where it fits, dots where it idles.

    With several stages on a rank, letters of all but the first are lower case.

    Args:
        timeline: what is shown.
        width: columns for the makespan, at most.

    >>> from functional_ds.pipelining import one_f_one_b, timeline
    >>> print(text(timeline(one_f_one_b(2, 3)), width=24))
    makespan 12, bubble 25.0%, peak memory 2
    rank 0 |F0F1....B0--F2B1--..B2--|
    rank 1 |..F0B0--F1B1--F2B2--....|
    """
    durations = np.concatenate([end - start for start, end in map(timeline.times, range(timeline.schedule.ranks))])
    shortest = float(durations[durations > 0].min(initial=timeline.makespan or 1.0))
    scale = min(width / (timeline.makespan or 1.0), 2 / shortest)
    columns = round(timeline.makespan * scale)
    lines = [f"makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}, peak memory {max(timeline.peak):g}"]
    label = len(f"rank {timeline.schedule.ranks - 1}")
    for rank in range(timeline.schedule.ranks):
        line = ["."] * columns
        own = timeline.schedule.stages_of(rank)
        for span in timeline.spans(rank):
            if span.action.kind > Kind.B:
                continue
            start, stop = round(span.start * scale), round(span.end * scale)
            letter = span.action.kind.name if span.action.stage == own[0] else span.action.kind.name.lower()
            name = f"{letter}{span.action.microbatch}"
            line[start:stop] = (name if len(name) <= stop - start else letter)[: stop - start].ljust(stop - start, "-")
        lines.append(f"{f'rank {rank}':<{label}} |{''.join(line)}|")
    return "\n".join(lines)
