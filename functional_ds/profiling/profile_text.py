"""A profile as text."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from functional_ds.comm.record.ledger import Row

from .module_flops import Flops
from .rank import RankProfile
from .spans import STAGES, SpanKey

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
