"""One rank's profile."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from functional_ds.base.device import held_bytes, peak_bytes, resident_peak_bytes
from functional_ds.comm.debug.trace import Slice
from functional_ds.comm.record.ledger import Event, Row

from .module_flops import Flops
from .spans import STAGES, SpanKey


@attrs.frozen
class MemoryStatus:
    """Bytes of this process, at the end and at peak; those of a device are None if none is in use.

    Attributes:
        host_peak: the process's peak memory on the host.
        held: of tensors on the device.
        reserved: by torch's allocator there.
        peak: of tensors there.
    """

    host_peak: int
    held: int | None = None
    reserved: int | None = None
    peak: int | None = None

    @classmethod
    def now(cls) -> "MemoryStatus":
        """The present status. Does not initialise a device, or wait for it.

        >>> MemoryStatus.now().host_peak > 0
        True
        """
        held, reserved = held_bytes() or (None, None)
        return cls(resident_peak_bytes(), held, reserved, peak_bytes())


@attrs.frozen
class RankProfile:
    """One rank's figures; times in seconds per step.

    Law: ``sum(places.values()) = detailed_seconds``: each moment of a step is counted once.

    Attributes:
        rank: in the world.
        shard: which of how many parts of the global batch the rank has; ranks with one part have one index.
        detailed: the number of steps that were timed in detail.
        detailed_seconds: of such a step.
        places: its time, by place.
        plain: the number of steps that ran without a profile.
        plain_seconds: from one such step to the next.
        outside_seconds: of these, the host's time between two steps: batches, logging.
        samples: rows of this rank's batches, per step.
        tokens: as the function ``tokens`` counts them; None without one.
        flops: of a step, by module, without submodules; empty if they were not counted.
        flops_seconds: how long the step took that counted them.
        peak: peak operations per second of this rank's device; None if unknown.
        calls: the timed calls of collectives by size, over all detailed steps.
        memory: after the last step.
        slices: what ran when, in the last detailed steps.
        events: the collectives of these.
    """

    rank: int
    shard: tuple[int, int]
    detailed: int
    detailed_seconds: float
    places: Mapping[SpanKey, float]
    plain: int
    plain_seconds: float
    outside_seconds: float
    samples: float
    tokens: float | None
    flops: Mapping[str, Flops]
    flops_seconds: float
    peak: float | None
    calls: Sequence[Row]
    memory: MemoryStatus
    slices: Sequence[Slice] = attrs.field(repr=False)
    events: Sequence[Event] = attrs.field(repr=False)

    @property
    def seconds(self) -> float:
        """Of a step: without the profile's overhead if there were plain steps."""
        return self.plain_seconds if self.plain else self.detailed_seconds

    @property
    def cost(self) -> float | None:
        """The relative overhead of a detailed step over a plain one; None before both have run."""
        within = self.plain_seconds - self.outside_seconds
        return self.detailed_seconds / within - 1 if self.plain and self.detailed and within > 0 else None

    @property
    def waiting(self) -> float:
        """Seconds of a detailed step inside of collectives."""
        return sum(seconds for place, seconds in self.places.items() if place.waits_for)

    def stage(self, stage: str) -> float:
        """Seconds of a detailed step in a stage, waits included."""
        return sum(seconds for place, seconds in self.places.items() if place.stage == stage)

    @property
    def all_flops(self) -> Flops:
        """Of a step on this rank."""
        return sum(self.flops.values(), Flops())

    def flops_below(self, path: str) -> Flops:
        """Those of a module and of the modules inside; of everything for ""."""
        return sum((flops for name, flops in self.flops.items() if not path or (name + ".").startswith(path + ".")), Flops())

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al. 2022): the model's operations per second, relative to the peak."""
        return self._utilisation(self.all_flops.model)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: the same of all operations, including recomputed ones."""
        return self._utilisation(self.all_flops.total)

    def _utilisation(self, flops: int) -> float | None:
        return flops / self.seconds / self.peak if self.peak and self.seconds and self.flops else None

    def numbers(self) -> dict[str, float]:
        """For loggers: by name, per step; throughput as if all ranks had batches of this size."""
        parts = self.shard[1]
        figures: dict[str, float | None] = {
            "seconds_per_step": self.seconds,
            "samples_per_second": self.samples * parts / self.seconds if self.seconds else None,
            "tokens_per_second": self.tokens * parts / self.seconds if self.tokens is not None and self.seconds else None,
            "tflops": self.all_flops.model / self.seconds / 1e12 if self.flops and self.seconds else None,
            "mfu": self.mfu,
            "hfu": self.hfu,
        }
        if self.detailed:
            figures |= {f"{stage}_seconds": self.stage(stage) for stage in STAGES}
            figures |= {"waiting_seconds": self.waiting, "bytes_sent": sum(row.bytes for row in self.calls) / self.detailed}
        return {f"profile/{name}": value for name, value in figures.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """All figures except those of the trace, as lists, dicts, strings and numbers."""
        figures = attrs.asdict(self, filter=lambda field, _: field.name not in ("slices", "events", "places", "flops", "calls"))
        figures["places"] = [{**place._asdict(), "seconds": seconds} for place, seconds in self.places.items()]
        figures["flops"] = {name: attrs.asdict(flops) for name, flops in self.flops.items()}
        figures["calls"] = [
            {
                "collective": row.collective,
                "group": row.group,
                "ranks": list(row.ranks),
                "calls": row.calls,
                "message_bytes": row.payload // row.calls,
                "bytes_sent": row.bytes,
                "seconds": row.seconds,
                "algbw": row.algorithmic_bandwidth,
                "busbw": row.bus_bandwidth,
            }
            for row in self.calls
        ]
        return {**figures, **{name: getattr(self, name) for name in ("seconds", "cost", "waiting", "mfu", "hfu")}}
