"""The profile of all ranks, and how to write it."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from functional_ds.comm.debug.page import Chart, calls_chart, write_page
from functional_ds.comm.debug.trace import Slice, slices_of, write_slices

from .module_flops import Flops
from .profile_text import text
from .rank import RankProfile


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
