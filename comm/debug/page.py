"""Charts of runs on an HTML page, which opens in a browser without a server: ranks as lanes, calls as spans, arrows, memory."""

import html
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from functional_ds.comm.record.ledger import Event

from .trace import Slice, slices_of

__all__ = ["Arrow", "Chart", "calls_chart", "write_page"]

_LANE, _SPAN, _CURVE, _WIDTH = 20, 14, 60, 1000  # pixels


@attrs.frozen
class Arrow:
    """From a place in one lane to a place in another."""

    from_lane: str
    from_time: float
    to_lane: str
    to_time: float


@attrs.frozen
class Chart:
    """Spans in lanes that share one axis. Notebooks show it; ``write_page`` writes several to a file.

    Attributes:
        title: a line of text.
        lanes: the slices of each lane, by its name, from top to bottom.
        arrows: between lanes.
        curve: below the lanes: places on the axis, in order, and a value from each on, such as the bytes in memory.
        unit: of the axis.
    """

    title: str
    lanes: Mapping[str, Sequence[Slice]]
    arrows: Sequence[Arrow] = ()
    curve: Sequence[tuple[float, float]] = ()
    unit: str = "s"

    def _repr_html_(self) -> str:
        return f"<figure><figcaption>{html.escape(self.title)}</figcaption>{self._svg()}</figure>"

    def _svg(self) -> str:
        spans = [span for lane in self.lanes.values() for span in lane]
        start = min((span.began for span in spans), default=0.0)
        length = max((span.ended for span in spans), default=start) - start or 1.0
        below = _LANE * len(self.lanes)
        height = below + (_CURVE if self.curve else 0)

        def x(time: float) -> float:
            return round((time - start) / length * _WIDTH, 3)

        middle = {name: _LANE * row + _LANE / 2 for row, name in enumerate(self.lanes)}
        names = "".join(f'<text x="4" y="{y + 4}">{html.escape(name)}</text>' for name, y in middle.items())
        rects = "".join(
            f'<rect x="{x(span.began)}" y="{middle[name] - _SPAN / 2}" width="{max(x(span.ended) - x(span.began), 0.5)}" '
            f'height="{_SPAN}" fill="hsl({zlib.crc32(span.name.encode()) % 360} 60% 60%)">'
            f"<title>{html.escape(self._said(span))}</title></rect>"
            for name, lane in self.lanes.items()
            for span in lane
        )
        top = max((value for _, value in self.curve), default=0.0)
        values = [(x(time), height - value / (top or 1.0) * (_CURVE - _LANE)) for time, value in self.curve]
        corners = [f"H{at} V{level:.2f}" for at, level in [*values, (_WIDTH, height)]]
        area = f'<path d="M0 {height} {" ".join(corners)} Z" fill-opacity="0.4"/>' if self.curve else ""
        names += f'<text x="4" y="{height - 4}">at most {top:,.0f}</text>' if self.curve else ""
        lines = "".join(
            f'<line x1="{x(one.from_time)}" y1="{middle[one.from_lane]}" x2="{x(one.to_time)}" y2="{middle[one.to_lane]}"/>'
            for one in self.arrows
        )
        view = f'viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" height="{height}"'
        return (
            f'<div style="display: flex"><svg style="flex: none" width="220" height="{height}" fill="currentColor">'
            f"{names}</svg>"
            f'<svg class="spans" style="flex: auto; min-width: 0" {view}>{rects}{area}'
            f'<g stroke="currentColor" stroke-opacity="0.5">{lines}</g></svg></div>'
        )

    def _said(self, span: Slice) -> str:
        more = "".join(f", {name} {value}" for name, value in span.more.items())
        return f"{span.name}: {span.ended - span.began:.6g} {self.unit}{more}"


class _RankEvents(Protocol):
    """A rank's ledger, or its profile."""

    @property
    def rank(self) -> int: ...

    @property
    def events(self) -> Sequence[Event]: ...


def calls_chart(ledgers: Sequence[_RankEvents], *, offsets: Mapping[int, float] | Sequence[float] | None = None) -> Chart:
    """The ranks' timed calls, a lane for each rank and group.

    An arrow of a message goes from the sender's call to the receiver's result; of a collective from the rank that called it
    last, for which the others waited, to the results of the others.

    Args:
        ledgers: of the ranks, with times; or the ranks of a profile.
        offsets: what to add to each rank's times, by rank: ``comm.debug.clock_offsets().seconds``. None where all ranks share a
            clock, as on one host.

    Raises:
        ValueError: no ledger has times.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     with comm.ledger(times=True) as book:
    ...         comm.all_reduce(torch.ones(6))
    ...     return book
    >>> chart = calls_chart(comm.simulate(program, world_size=3))
    >>> list(chart.lanes), len(chart.arrows)
    (['rank 0, world', 'rank 1, world', 'rank 2, world'], 2)
    """
    if not any(ledger.events for ledger in ledgers):
        raise ValueError("ledgers: no ledger has times; open them with comm.ledger(times=True)")
    lanes: dict[str, list[Slice]] = {}
    calls: dict[tuple[object, ...], dict[int, Event]] = {}
    for ledger in sorted(ledgers, key=lambda one: one.rank):
        counts: dict[tuple[object, ...], int] = {}
        ahead = 0.0 if offsets is None else offsets[ledger.rank]
        events = [attrs.evolve(event, began=event.began + ahead, ended=event.ended + ahead) for event in ledger.events]
        for event in sorted(events, key=lambda event: event.began):
            sequence = (event.group, event.ranks, event.order)
            counts[sequence] = counts.get(sequence, 0) + 1
            calls.setdefault((*sequence, counts[sequence]), {})[ledger.rank] = event
            lanes.setdefault(_lane(ledger.rank, event), []).extend(slices_of([event]))
    arrows = [arrow for by_rank in calls.values() for arrow in _arrows(by_rank)]
    return Chart(f"Collectives of {len(ledgers)} ranks", lanes, arrows)


def _lane(rank: int, event: Event) -> str:
    return f"rank {rank}, {event.group}"


def _arrows(call: Mapping[int, Event]) -> list[Arrow]:
    """Those of one call, from each rank's part in it."""
    source = max(call, key=lambda rank: call[rank].began)
    first = call[source]
    if first.traffic.role == "message" and isinstance(first.order, tuple):
        source = first.ranks[first.order[0]]
    if source not in call:
        return []
    return [
        Arrow(_lane(source, call[source]), call[source].began, _lane(rank, event), event.ended)
        for rank, event in call.items()
        if rank != source
    ]


def write_page(charts: Sequence[Chart], path: str | Path, *, title: str = "A run") -> None:
    """Writes charts as a page of HTML without other files. The mouse wheel zooms, a span tells what it is when pointed at.

    Args:
        charts: from top to bottom.
        path: the file.
        title: the page's.
    """
    figures = "".join(chart._repr_html_() for chart in charts)
    Path(path).write_text(_PAGE.replace("TITLE", html.escape(title)).replace("FIGURES", figures), encoding="utf-8")


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>TITLE</title><style>
:root { color-scheme: light dark; font: 13px system-ui, sans-serif }
.spans { background: color-mix(in srgb, currentColor 6%, transparent) }
line { vector-effect: non-scaling-stroke; marker-end: url(#head) }
</style></head><body><h1>TITLE</h1>
<svg width="0" height="0"><defs><marker id="head" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6"
orient="auto"><path d="M0 0L6 3L0 6z" fill="currentColor"/></marker></defs></svg>
FIGURES<script>
for (const svg of document.querySelectorAll("svg.spans")) {
  const box = svg.viewBox.baseVal, whole = box.width;
  svg.addEventListener("wheel", event => {
    if (event.shiftKey) return;
    event.preventDefault();
    const at = event.offsetX / svg.clientWidth, center = box.x + at * box.width;
    box.width = Math.min(whole, box.width * (event.deltaY < 0 ? 0.8 : 1.25));
    box.x = Math.max(0, Math.min(whole - box.width, center - at * box.width));
  }, { passive: false });
}
</script></body></html>
"""
