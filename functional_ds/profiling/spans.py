"""A breakdown of a rank's time: every moment of a step belongs to one phase of one transform, or to one wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

import attrs
from torch import Tensor

from functional_ds.comm.debug.trace import Slice
from functional_ds.comm.record.ledger import Ledger, LedgerCall
from functional_ds.comm.table.collective import Handle, WatchedHandle
from functional_ds.step.phase_signatures import Phase
from functional_ds.step.phases import mapped
from functional_ds.step.step import Step
from functional_ds.step.views.view import View

from .plain_steps import wait_for_device

STAGES = ("forward", "backward", "passes", "reduce", "update", "other")
"""Of a step: "passes" is what transforms do around passes, and a pipeline's backward passes, which alternate with messages."""

_STAGE_OF = {
    "view": "forward",
    "loss": "forward",
    "forward": "forward",
    "gradients": "passes",
    "reduce": "reduce",
    "sum_over_ranks": "reduce",
    "sync_buffers": "reduce",
    "scatter": "update",
    "update": "update",
    "publish": "update",
}


class SpanKey(NamedTuple):
    """The place of a moment of a step.

    Attributes:
        stage: one of ``STAGES``.
        phase: the phase of the step; "step" between phases.
        by: the transform that wraps the phase, or the base step.
        waits_for: the collective and its group, inside of one; "" during computation.
    """

    stage: str
    phase: str
    by: str
    waits_for: str = ""


@attrs.define(eq=False)
class SpanClock:
    """One step's time, by place.

    Law: the times of all places add up to the step's time, because each moment is counted once, at the innermost place.

    On a device the host synchronises wherever the place changes.

    Attributes:
        clock: in seconds.
        totals: seconds by place.
        slices: what ran when, for a trace.
    """

    clock: Callable[[], float] = perf_counter
    totals: dict[SpanKey, float] = attrs.field(factory=dict)
    slices: list[Slice] = attrs.field(factory=list)
    seconds: float = 0.0
    _open: list[tuple[SpanKey, float]] = attrs.field(factory=list)
    _last: float = 0.0
    _thread: int = attrs.field(factory=get_ident)

    @property
    def here(self) -> bool:
        """Whether a step is running in this thread."""
        return bool(self._open) and get_ident() == self._thread

    @property
    def stage(self) -> str:
        """Of the innermost place."""
        return self._open[-1][0].stage if self._open else "other"

    @property
    def phase(self) -> str:
        """Of the innermost place."""
        return self._open[-1][0].phase if self._open else ""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step."""
        self._thread = get_ident()
        began = self._last = self._now()
        self._open.append((SpanKey("other", "step", name), began))
        try:
            yield
        finally:
            self._end()
            self.seconds = self._last - began

    @contextmanager
    def within(self, phase: str, by: str, stage: str | None = None) -> Iterator[None]:
        """A phase; without a stage it belongs to the one of its name, or to the enclosing one."""
        outer = self._open[-1][0]
        fresh = outer.phase == "gradients" or outer.stage in ("other", "passes")
        inherited = _STAGE_OF.get(phase, outer.stage) if fresh else outer.stage
        self._begin(SpanKey(stage or inherited, phase, by))
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A wait."""
        if not self.here:
            yield
            return
        self._begin(self._open[-1][0]._replace(waits_for=what))
        try:
            yield
        finally:
            self._end()

    def waited(self, what: str, began: float) -> None:
        """A wait since then is over; nothing else has ended in between."""
        if not self.here:
            return
        began = max(began, self._last)
        self._count(began)
        self._open.append((self._open[-1][0]._replace(waits_for=what), began))
        self._end()

    def forward_ended(self) -> None:
        """From here on the base's current pass is a backward pass."""
        if self.here and self._open[-1][0].stage == "forward":
            place, began = self._open.pop()
            self._count(self._now(), place)
            self._open.append((place._replace(stage="backward"), began))

    def _begin(self, place: SpanKey) -> None:
        now = self._now()
        self._count(now)
        self._open.append((place, now))

    def _end(self) -> None:
        now = self._now()
        self._count(now)
        place, began = self._open.pop()
        name = place.waits_for or place.phase
        self.slices.append(Slice("step", name, began, now, {"by": place.by, "stage": place.stage}))

    def _count(self, now: float, place: SpanKey | None = None) -> None:
        place = place or self._open[-1][0]
        self.totals[place] = self.totals.get(place, 0.0) + now - self._last
        self._last = now

    def _now(self) -> float:
        wait_for_device()
        return self.clock()


@attrs.define(eq=False)
class WaitLedger(Ledger):
    """A timed ledger that tells a ``SpanClock`` when its rank is inside of a collective."""

    spans: SpanClock = attrs.field(factory=SpanClock, kw_only=True, repr=False)

    def record(self, made: LedgerCall, handle: Handle, began: float, *, early: bool) -> Handle:
        """As a ledger does, with the same arguments."""
        what = f"{made.call.title(made.here.rank)[0]} {made.group}"
        self.spans.waited(what, began)
        inner = super().record(made, handle, began, early=early)

        def waits(wait: Callable[[], list[Tensor]]) -> list[Tensor]:
            with self.spans.waiting(what):
                return wait()

        return WatchedHandle(inner, waits)


def timed(step: Step, now: Callable[[], SpanClock | None], *, around: Callable[..., Any] | None = None) -> Step:
    """The step, with each phase reporting its begin and end to a clock; results are unchanged.

    Args:
        step: any.
        now: the clock of the current step; None if none is timed.
        around: called as ``around(phase, function, step, *args)`` instead of each of the base's functions.
    """

    def watched(by: str, phase: str, function: Phase, stage: str | None = None) -> Phase:
        def run(*args: Any) -> Any:
            spans = now()
            if spans is None or not spans.here:
                return function(*args)
            outer = phase == "view" and spans.phase != "view"
            with spans.within(phase, by, stage):
                result = function(*args)
            return _telling(result, spans) if outer else result

        return run

    def base(phase: str, function: Phase) -> Phase:
        stage = "forward" if phase == "gradients" else None  # until ``forward_ended``
        return watched(step.name, phase, function if around is None else partial(around, phase, function), stage)

    layers = tuple(mapped(layer, partial(watched, layer.name)) for layer in step.layers)
    return attrs.evolve(
        step,
        base={phase: base(phase, function) for phase, function in step.base.items()},
        layers=layers,
        over_ranks={name: watched(step.name, name, function) for name, function in step.over_ranks.items()},
    )


def _telling(view: View, spans: SpanClock) -> View:
    """The view, which reports to the clock when its forward pass has ended."""

    def finish() -> None:
        view.finish()
        spans.forward_ended()

    return attrs.evolve(view, finish=finish)
