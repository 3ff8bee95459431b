"""Timelines of runs as a self-contained HTML page: a lane for each rank, spans for calls, arrows, and memory."""

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from functional_ds.comm.record.ledger import Event
from functional_ds.comm.table.errors import DeadlockError

from .trace import Slice, slices_of

_LANE, _SPAN, _CURVE, _AXIS = 20, 14, 60, 18  # pixels
_LEGEND = 120  # characters of all names; with more there is no legend
_LETTER = 0.008  # a character's width as a part of the chart's; a span shows its name if it fits
_MARK = (
    '<defs><marker id="fds-head" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="5" markerHeight="5" orient="auto">'
    '<path d="M0 0L6 3L0 6z" fill="currentColor"/></marker></defs>'
)


@attrs.frozen
class Arrow:
    """An arrow from a time in one lane to a time in another."""

    from_lane: str
    from_time: float
    to_lane: str
    to_time: float


@attrs.frozen
class Chart:
    """A timeline: spans in lanes over one axis. Notebooks display it; ``write_page`` writes several to a file.

    Attributes:
        title: a line of text.
        lanes: the slices of each lane, by its name, from top to bottom.
        arrows: arrows between lanes.
        curve: a curve below the lanes: (position on the axis, bytes in memory from there on) pairs, in order.
        unit: the axis's unit; empty for the units of a schedule, None for no axis.

    >>> from functional_ds.comm.debug import Slice
    >>> chart = Chart("two ranks", {f"rank {rank}": [Slice("", "forward", rank, rank + 1)] for rank in range(2)}, unit="")
    >>> chart
    Chart(title='two ranks', unit='')
    """

    title: str
    lanes: Mapping[str, Sequence[Slice]] = attrs.field(repr=False)
    arrows: Sequence[Arrow] = attrs.field(default=(), repr=False)
    curve: Sequence[tuple[float, float]] = attrs.field(default=(), repr=False)
    unit: str | None = "s"

    def _repr_html_(self) -> str:
        names = sorted({span.name for lane in self.lanes.values() for span in lane})
        fills = {name: f"hsl({index * 137.5 % 360:g} 60% 70%)" for index, name in enumerate(names)}
        shown = " ".join(
            f'<span style="background: {fill}; color: #000; padding: 0 4px; white-space: nowrap">{html.escape(name)}</span>'
            for name, fill in fills.items()
        )
        legend = f"<div>{shown}</div>" if len(names) > 1 and len("".join(names)) <= _LEGEND else ""
        caption = f"<figcaption>{html.escape(self.title)}</figcaption>{legend}"
        return f'<figure style="margin: 16px 0">{caption}{self._drawn(fills)}</figure>'

    def _drawn(self, fills: Mapping[str, str]) -> str:
        """The lanes' names and spans as HTML; positions are in percent, so that the chart is as wide as its page."""
        spans = [span for lane in self.lanes.values() for span in lane]
        start = min((span.began for span in spans), default=0.0)
        length = max((span.ended for span in spans), default=start) - start or 1.0
        lanes = _LANE * len(self.lanes)
        below = lanes + (_CURVE if self.curve else 0)

        def x(time: float) -> float:
            return round((time - start) / length * 100, 4)

        middle = {name: _LANE * row + _LANE / 2 for row, name in enumerate(self.lanes)}
        heads = "".join(_head(name, _LANE) for name in self.lanes)
        if self.curve:
            heads += _head(f"memory, at most {max(value for _, value in self.curve):,.0f} bytes", _CURVE)
        drawn = "".join(
            f'<svg class="span" x="{x(span.began)}%" y="{middle[name] - _SPAN / 2}" height="{_SPAN}" '
            f'width="{max(x(span.ended) - x(span.began), 0.05):.4f}%"><title>{html.escape(self._said(span))}</title>'
            f'<rect width="100%" height="100%" fill="{fills[span.name]}"/>'
            + (
                f'<text x="2" y="11" fill="#000">{html.escape(span.name)}</text>'
                if span.ended - span.began > _LETTER * (len(span.name) + 0.5) * length
                else ""
            )
            + "</svg>"
            for name, lane in self.lanes.items()
            for span in lane
        )
        lines = "".join(
            f'<line x1="{x(one.from_time)}%" y1="{middle[one.from_lane]}" x2="{x(one.to_time)}%" y2="{middle[one.to_lane]}" '
            'marker-end="url(#fds-head)"/>'
            for one in self.arrows
        )
        anchors = ("start", "middle", "middle", "middle", "end")
        ticks = "".join(
            f'<text x="{part * 25}%" y="{below + 13}" text-anchor="{anchor}">{html.escape(self._at(length * part / 4))}</text>'
            for part, anchor in enumerate(anchors if self.unit is not None else ())
        )
        wide = 'width="100%" style="min-width: 560px; display: block; background: rgb(127 127 127 / 0.1)"'
        return (
            '<div style="display: flex; font: 11px/1.2 sans-serif">'
            f'<div style="flex: none; max-width: 35%; padding-right: 6px">{heads}</div>'
            '<div class="scrolls" style="flex: auto; min-width: 0; overflow-x: auto">'
            f'<svg class="spans" height="{below + (_AXIS if ticks else 0)}" {wide} fill="currentColor">{_MARK}{drawn}'
            f'{self._area(x, lanes)}{ticks}<g stroke="currentColor" stroke-opacity="0.45">{lines}</g></svg></div></div>'
        )

    def _area(self, x: Callable[[float], float], top: int) -> str:
        """The curve as a separate picture, which is stretched to the chart's width."""
        if not self.curve:
            return ""
        most, room = max(value for _, value in self.curve) or 1.0, _CURVE - 6
        corners = " ".join(f"H{min(max(x(time), 0), 100)} V{_CURVE - value / most * room:.2f}" for time, value in self.curve)
        path = f'<path d="M0 {_CURVE} {corners} H100 V{_CURVE} Z" fill-opacity="0.4"/>'
        return (
            f'<svg y="{top}" width="100%" height="{_CURVE}" viewBox="0 0 100 {_CURVE}" preserveAspectRatio="none">{path}</svg>'
        )

    def _said(self, span: Slice) -> str:
        more = "".join(f", {name} {value}" for name, value in span.more.items())
        return f"{span.name}: {self._at(span.ended - span.began)}{more}"

    def _at(self, length: float) -> str:
        """A length of the axis with its unit; short times in ms or μs."""
        if self.unit != "s" or length >= 1 or not length:
            return f"{length:.6g} {self.unit or ''}".strip()
        return f"{length * 1e3:.4g} ms" if length >= 1e-3 else f"{length * 1e6:.4g} μs"


def _head(name: str, height: int) -> str:
    """A lane's name, truncated on narrow pages."""
    style = f"height: {height}px; line-height: {_LANE}px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap"
    return f'<div class="head" style="{style}" title="{html.escape(name)}">{html.escape(name)}</div>'


class _RankEvents(Protocol):
    """A rank's ledger, or its profile."""

    @property
    def rank(self) -> int: ...

    @property
    def events(self) -> Sequence[Event]: ...


def calls_chart(
    ledgers: Sequence[_RankEvents],
    *,
    offsets: Mapping[int, float] | Sequence[float] | None = None,
    memory: Sequence[tuple[float, float]] = (),
) -> Chart:
    """A timeline of the ranks' timed calls, with a lane for each rank and group.

    A message's arrow goes from the sender's call to the receiver's result. A collective's arrows go from the last rank that
    called it, for which the others waited, to their results.

    Args:
        ledgers: the ranks' ledgers, with times, or the ranks of a profile.
        offsets: added to each rank's times: ``comm.debug.clock_offsets().seconds``. None if all ranks share a clock, as on one
            host.
        memory: a curve below the lanes: a rank's (time, bytes from then on) pairs, such as ``run.events.curve()`` of
            ``fds.memory.recorded``.

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
    return Chart(f"Collectives of {len(ledgers)} ranks", lanes, arrows, memory)


def _lane(rank: int, event: Event) -> str:
    return f"rank {rank}, {event.group}"


def _arrows(call: Mapping[int, Event]) -> list[Arrow]:
    """The arrows of one call, from each rank's part in it."""
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


def waits_chart(error: DeadlockError) -> Chart:
    """A picture of a deadlock: the call that each rank waits in, and arrows to the ranks that it waits for.

    Law: the title names a cycle of ranks that wait for each other; if there is none, a rank that waits for a finished one.

    Args:
        error: from ``simulate``.

    Raises:
        ValueError: the error has no ``waits``.

    >>> import torch
    >>> from functional_ds import comm
    >>> def facing():
    ...     other = 1 - comm.world().rank
    ...     comm.send(torch.ones(1), other)
    ...     comm.recv(torch.ones(1), other)
    >>> try:
    ...     comm.simulate(facing, world_size=2)
    ... except comm.errors.DeadlockError as error:
    ...     print(waits_chart(error).title)
    deadlock: rank 0 waits for rank 1, rank 1 waits for rank 0
    """
    if not error.waits:
        raise ValueError("error: it has no record of which rank waits for which; errors of comm.simulate have one")
    ranks = sorted({*error.waits, *(other for _, others in error.waits.values() for other in others)})
    lanes = {f"rank {rank}": [Slice("", error.waits[rank][0], 0, 1)] if rank in error.waits else [] for rank in ranks}
    pairs = [(rank, other) for rank, (_, others) in error.waits.items() for other in others]
    places = [0.4 + 0.6 * (index + 0.5) / len(pairs) for index in range(len(pairs))]
    arrows = [Arrow(f"rank {a}", at, f"rank {b}", at) for (a, b), at in zip(pairs, places, strict=True)]
    story = ", ".join(
        f"rank {a} waits for rank {b}" for a, b in _cycle({rank: others for rank, (_, others) in error.waits.items()})
    )
    return Chart(f"deadlock: {story}", lanes, arrows, unit=None)


def _cycle(waits: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
    """A cycle in which each rank waits for the next; else a rank that waits for one that does not wait."""
    inside = set(waits)
    while ends := {rank for rank in inside if inside.isdisjoint(waits[rank])}:
        inside -= ends
    if not inside:
        return [(rank, others[0]) for rank, others in waits.items() if others[0] not in waits][:1]
    chain = [min(inside)]
    while (following := next(rank for rank in waits[chain[-1]] if rank in inside)) not in chain:
        chain.append(following)
    chain = chain[chain.index(following) :]
    return list(zip(chain, [*chain[1:], following], strict=True))


def write_page(charts: Sequence[Chart], path: str | Path, *, title: str = "A run") -> None:
    """Writes charts to a self-contained HTML page.

    Control and the mouse wheel zoom, and hovering over a span shows its details. On a narrow page the lanes scroll.

    Args:
        charts: from top to bottom.
        path: the file.
        title: the page's title.

    >>> import tempfile
    >>> from functional_ds.comm.debug.trace import Slice
    >>> chart = Chart("one rank", {"rank 0": [Slice("", "forward", 0.0, 1.0)]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_page([chart], f"{folder}/page.html", title="My run")
    ...     "<title>My run</title>" in Path(folder, "page.html").read_text()
    True
    """
    figures = "".join(chart._repr_html_() for chart in charts)
    Path(path).write_text(_PAGE.replace("TITLE", html.escape(title)).replace("FIGURES", figures), encoding="utf-8")


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>TITLE</title><style>
:root { color-scheme: light dark; font: 13px system-ui, sans-serif }
h1 { font-size: 18px }
</style></head><body><h1>TITLE</h1>
FIGURES<script>
for (const svg of document.querySelectorAll("svg.spans")) {
  svg.addEventListener("wheel", event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const box = svg.parentElement, left = event.clientX - box.getBoundingClientRect().left;
    const at = (box.scrollLeft + left) / svg.clientWidth;
    svg.style.minWidth = Math.max(560, Math.min(100000, svg.clientWidth * (event.deltaY < 0 ? 1.25 : 0.8))) + "px";
    box.scrollLeft = at * svg.clientWidth - left;
  }, { passive: false });
}
</script></body></html>
"""
