"""The profile of all ranks, and how to write it."""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from functional_ds.comm.debug.page import Chart, calls_chart, write_page
from functional_ds.comm.debug.trace import Slice, slices_of, write_slices
from functional_ds.comm.record.ledger import Row

from .module_flops import Flops
from .rank import RankProfile
from .spans import STAGES, SpanKey


@attrs.frozen
class Profile:
    """The figures of all ranks; printed, it is a table.

    Attributes:
        step: what ran, as text.
        ranks: in order.
        offsets: what to add to each rank's times to get the first rank's clock.
        clock_error: the largest error of an offset; 0 if ranks share a clock.
    """

    step: str
    ranks: Sequence[RankProfile]
    offsets: Sequence[float]
    clock_error: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a step, on the slowest rank."""
        return max(profile.seconds for profile in self.ranks)

    @property
    def samples(self) -> float:
        """Rows of a step's global batch; rows shared by several ranks are counted once."""
        return self._once(lambda profile: profile.samples)

    @property
    def tokens(self) -> float | None:
        """Tokens of a step's global batch, each once."""
        return (
            None if any(profile.tokens is None for profile in self.ranks) else self._once(lambda profile: profile.tokens or 0)
        )

    @property
    def all_flops(self) -> Flops:
        """Of a step, over all ranks."""
        return sum((profile.all_flops for profile in self.ranks), Flops())

    def numbers(self) -> dict[str, float]:
        """The totals by name; times of a step are those of the slowest rank."""
        figures: dict[str, float | None] = {
            "ranks": len(self.ranks),
            "seconds_per_step": self.seconds,
            "samples_per_second": self._rate(self.samples),
            "tokens_per_second": self._rate(self.tokens),
            "tflops": self._rate(self.all_flops.model / 1e12) if self.all_flops.model else None,
            "mfu": _mean(profile.mfu for profile in self.ranks),
            "hfu": _mean(profile.hfu for profile in self.ranks),
            "cost": _mean(profile.cost for profile in self.ranks),
        }
        return {name: value for name, value in figures.items() if value is not None}

    def to_json(self, path: str | Path) -> None:
        """Writes all figures except the slices of the trace."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    def as_dict(self) -> dict[str, Any]:
        """All figures except the slices of the trace, as lists, dicts, strings and numbers."""
        return {"step": self.step, "all_ranks": self.numbers(), "ranks": [profile.as_dict() for profile in self.ranks]}

    def to_trace(self, path: str | Path) -> None:
        """Writes the last detailed steps as a Chrome trace, for ui.perfetto.dev: one process per rank, all on one clock.

        Raises:
            ValueError: no step was timed in detail.
        """
        slices = {profile.rank: [*profile.slices, *slices_of(profile.events)] for profile in self.ranks}
        if not any(slices.values()):
            raise ValueError("profile: no step was timed in detail yet; make more steps, or a smaller skip= and every=")
        write_slices(slices, path, offsets=self._ahead())

    def charts(self) -> list[Chart]:
        """The last detailed steps: phases and waits of each rank, and its collectives, all on one clock."""
        lanes: dict[str, list[Slice]] = {}
        for profile in self.ranks:
            ahead = self._ahead()[profile.rank]
            for span in profile.slices:
                moved = attrs.evolve(span, began=span.began + ahead, ended=span.ended + ahead)
                lanes.setdefault(f"rank {profile.rank}, {span.lane}", []).append(moved)
        timed = any(profile.events for profile in self.ranks)
        return [Chart("Phases", lanes), *([calls_chart(self.ranks, offsets=self._ahead())] if timed else [])]

    def _ahead(self) -> dict[int, float]:
        return {profile.rank: offset for profile, offset in zip(self.ranks, self.offsets, strict=True)}

    def save(self, folder: str | Path) -> None:
        """Writes ``profile.txt``, ``profile.json``, and ``trace.json`` and ``trace.html`` if a step was timed in detail."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / "profile.txt").write_text(f"{self}\n", encoding="utf-8")
        self.to_json(place / "profile.json")
        if any(profile.slices for profile in self.ranks):
            self.to_trace(place / "trace.json")
            write_page(self.charts(), place / "trace.html", title=self.step)

    def __str__(self) -> str:
        return text(self.step, self.ranks, self.numbers())

    def _once(self, count: Callable[[RankProfile], float]) -> float:
        """A sum over the parts of the batch, of which several ranks may have one."""
        return sum({profile.shard[0]: count(profile) for profile in self.ranks}.values())

    def _rate(self, count: float | None) -> float | None:
        return None if count is None or not self.seconds else count / self.seconds


def _mean(values: Iterable[float | None]) -> float | None:
    given = list(values)
    known = [value for value in given if value is not None]
    return sum(known) / len(known) if given and len(known) == len(given) else None


_WIDTH, _MANY, _ROWS = 48, 16, 24


def text(step: str, ranks: Sequence[RankProfile], numbers: Mapping[str, float]) -> str:
    """The totals, then the first rank's time, all ranks' waits, and the first one's operations, collectives and memory."""
    rank = ranks[0]
    parts = [[step, *_head(ranks, numbers)]]
    if rank.detailed:
        parts.append(list(_times(rank)))
        if len(ranks) > 1:
            parts.append(list(_ranks(ranks)))
    if rank.flops:
        parts.append(list(_flops(rank.flops)))
    if rank.calls:
        parts.append(list(_calls(rank.calls, rank.detailed)))
    parts.append(list(_memory(rank)))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(ranks: Sequence[RankProfile], numbers: Mapping[str, float]) -> Iterator[str]:
    rank = ranks[0]
    yield f"{len(ranks)} ranks; {rank.plain} plain steps, {rank.detailed} timed in detail"
    yield _line("seconds a step", f"{numbers['seconds_per_step']:.6f}")
    if rank.plain:
        yield _line("  of these, between two steps", f"{max(profile.outside_seconds for profile in ranks):.6f}")
    names = {"samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}
    for name, shown in names.items():
        if name in numbers:
            yield _line(shown, f"{numbers[name]:,.1f}")
    if "tflops" in numbers:
        yield _line("TFLOPS of the model", f"{numbers['tflops']:.6g}")
    if "mfu" in numbers:
        yield _line("MFU, and HFU", f"{numbers['mfu']:.1%}, {numbers['hfu']:.1%}")
    if "cost" in numbers:
        yield _line("a detailed step takes longer by", f"{numbers['cost']:+.1%}")


def _line(name: str, value: str) -> str:
    return f"{name:<{_WIDTH}}{value:>16}"


def _times(rank: RankProfile) -> Iterator[str]:
    yield f"{f'rank {rank.rank}, a detailed step':<{_WIDTH}}{'ms':>10}{'%':>8}"
    base = next((place.by for place in rank.places if place.phase == "step"), "")
    for stage in STAGES:
        places = {place: seconds for place, seconds in rank.places.items() if place.stage == stage}
        if not places:
            continue
        yield _share(stage, sum(places.values()), rank)
        for name, seconds in _shown(places, base):
            yield _share(name, seconds, rank)
    yield _share("all", rank.detailed_seconds, rank)
    yield _share("  in collectives", rank.waiting, rank)


def _shown(places: Mapping[SpanKey, float], base: str) -> Iterator[tuple[str, float]]:
    """Waits by what is waited for, and the rest by phase, and transform if it is not the base step; the longest first."""
    sums: dict[str, float] = {}
    for place, seconds in places.items():
        of = "" if place.by == base else f" of {place.by if len(place.by) <= 30 else place.by[:27] + '...'}"
        name = f"  in {place.waits_for}" if place.waits_for else f"  {place.phase}{of}"
        sums[name] = sums.get(name, 0.0) + seconds
    yield from sorted(sums.items(), key=lambda pair: -pair[1])


def _ranks(ranks: Sequence[RankProfile]) -> Iterator[str]:
    """The ranks that wait least, for which others wait, first; of many ranks, both ends."""
    yield f"{'ms of a detailed step':<{_WIDTH}}{'all':>10}{'computing':>14}{'in collectives':>16}"
    ordered = sorted(ranks, key=lambda profile: profile.waiting)
    for profile in ordered if len(ordered) <= _MANY else [*ordered[: _MANY // 2], *ordered[-_MANY // 2 :]]:
        times = (profile.detailed_seconds, profile.detailed_seconds - profile.waiting, profile.waiting)
        yield f"{f'  rank {profile.rank}':<{_WIDTH}}{times[0] * 1e3:>10.3f}{times[1] * 1e3:>14.3f}{times[2] * 1e3:>16.3f}"


def _share(name: str, seconds: float, rank: RankProfile) -> str:
    return f"{name:<{_WIDTH}}{seconds * 1e3:>10.3f}{seconds / max(rank.detailed_seconds, 1e-12):>8.1%}"


def _flops(by_module: Mapping[str, Flops]) -> Iterator[str]:
    """Modules with their submodules, as many levels deep as fit."""
    yield f"{'MFLOP a step, by module':<{_WIDTH}}{'forward':>14}{'backward':>14}{'recomputed':>14}{'others':>14}"
    below: dict[str, Flops] = {}
    for path, flops in by_module.items():
        parts = path.split(".") if path else []
        for depth in range(len(parts) + 1):
            name = ".".join(parts[:depth])
            below[name] = below.get(name, Flops()) + flops
    depths = sorted(_depth(name) for name in below)
    deepest = max(depth for depth in depths if depth <= 1 or bisect_right(depths, depth) <= _ROWS)
    for name, total in below.items():
        if _depth(name) <= deepest:
            figures = (total.forward, total.backward, total.recomputed, total.others)
            label = "  " * _depth(name) + (name or "all")
            yield f"{label:<{_WIDTH}}" + "".join(f"{figure / 1e6:>14,.6g}" for figure in figures)


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _calls(rows: Sequence[Row], steps: int) -> Iterator[str]:
    head = f"{'collective':<16}{'group':<16}{'ranks':>6}{'message bytes':>16}{'calls a step':>14}{'ms a step':>12}"
    yield f"{head}{'ms a call':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}"
    for row in rows:
        rates = (row.algorithmic_bandwidth, row.bus_bandwidth)
        yield (
            f"{row.collective:<16}{row.group:<16}{row.size:>6}{row.payload // row.calls:>16,}{row.calls / steps:>14.1f}"
            f"{row.seconds / steps * 1e3:>12.3f}{row.seconds / row.calls * 1e3:>12.3f}"
            + "".join(f"{'overlapped' if rate is None else f'{rate / 1e9:.3g}':>12}" for rate in rates)
        )


def _memory(rank: RankProfile) -> Iterator[str]:
    memory = rank.memory
    for name, size in {
        "tensors on the device": memory.held,
        "most tensors on the device": memory.peak,
        "reserved on the device": memory.reserved,
        "most memory of the process on the host": memory.host_peak,
    }.items():
        if size is not None:
            yield _line(name, f"{size:,} B")
