"""``profile``: a step that measures some of its calls."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import attrs

from functional_ds import comm
from functional_ds.base.tree import rows_of
from functional_ds.comm.debug.trace import Slice, opened
from functional_ds.comm.record.ledger import Event, RowsBySize, add_by_size
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .module_flops import Flops, ModuleFlops
from .plain_steps import PlainSteps
from .rank import MemoryStatus, RankProfile
from .result import Profile
from .spans import SpanClock, SpanKey, WaitLedger, timed


def _positive(_: Any, field: "attrs.Attribute[Any]", value: Any) -> None:
    least = 0 if field.name == "skip" else 1
    if type(value) is not int or value < least:
        raise ValueError(f"{field.name}={value!r}: pass a whole number of at least {least}")


@attrs.frozen
class Profiling:
    """Which steps to measure, and how: ``profile``'s arguments as a value, for ``fds.Logging(profile=...)``.

    >>> Profiling(every=100).every
    100
    """

    skip: int = attrs.field(default=2, kw_only=True, validator=_positive)
    every: int = attrs.field(default=10, kw_only=True, validator=_positive)
    keep: int = attrs.field(default=2, kw_only=True, validator=_positive)
    flops: bool = attrs.field(default=True, kw_only=True)
    tokens: Callable[[Any], int] | None = attrs.field(default=None, kw_only=True)
    peak: float | None = attrs.field(default=None, kw_only=True)
    folder: Path | None = attrs.field(default=None, kw_only=True, converter=attrs.converters.optional(Path))

    def start(self, step: Step) -> "Profiled":
        """The step with a profile; each rank starts one."""
        if not isinstance(step, Step):
            raise TypeError(f"profile: step={step!r} is not a Step; pass what fds.train_step and transforms make")
        return Profiled(step, self)


def profile(
    step: Step,
    *,
    skip: int = 2,
    every: int = 10,
    keep: int = 2,
    flops: bool = True,
    tokens: Callable[[Any], int] | None = None,
    peak: float | None = None,
) -> "Profiled":
    """Profiles a step: returns a step to call as before, which measures the time, operations and bytes of some calls.

    Laws: state and metrics are bitwise those of ``step``. The times of all places of a detailed step add up to its time.

    After ``skip`` calls, one counts operations; then one of every ``every`` is timed in detail: each phase of each transform,
    and each collective. All others run ``step`` itself, and only the time from one to the next is taken, which gives the
    throughput. On a device the host synchronises around each phase and collective of a detailed step, so they do not overlap in
    it; the profile reports the overhead.

    Args:
        step: any step.
        skip: calls at the beginning that are not measured, because they build caches.
        every: one of so many calls is timed in detail; 1 for each.
        keep: how many detailed steps the trace shows.
        flops: whether to count operations.
        tokens: from a rank's batch to its tokens; None counts only rows.
        peak: peak operations per second of one rank's device, for MFU: from its data sheet, or ``profiling.peak_flops()``.

    Raises:
        TypeError: ``step`` is not a step.
        ValueError: ``skip``, ``every`` or ``keep`` is too small.

    >>> import torch, functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (x @ params["w"]).square().mean(), fds.sgd(0.1))
    >>> profiled = profile(step, skip=0, every=1)
    >>> state = step.init({"w": torch.ones(4, 2)})
    >>> for _ in range(2):
    ...     state, metrics = profiled(state, torch.ones(3, 4))
    >>> found = profiled.result()
    >>> found.all_flops.forward, found.all_flops.backward  # the batch needs no gradient
    (48, 48)
    """
    return Profiling(skip=skip, every=every, keep=keep, flops=flops, tokens=tokens, peak=peak).start(step)


@attrs.define(eq=False)
class Profiled:
    """A step that measures some of its calls; made by ``profile``.

    Attributes:
        step: the step without a profile.
        settings: what is measured, and when.
        made: the number of calls so far.
    """

    step: Step
    settings: Profiling
    made: int = attrs.field(default=0, init=False)
    _timed: Step = attrs.field(init=False, repr=False)
    _spans: SpanClock | None = attrs.field(default=None, init=False, repr=False)
    _thread: int = attrs.field(factory=get_ident, init=False, repr=False)
    _shard: tuple[int, int] = attrs.field(default=(0, 1), init=False, repr=False)
    _plain: PlainSteps = attrs.field(factory=PlainSteps, init=False, repr=False)
    # what has been counted
    _counted: int = attrs.field(default=0, init=False, repr=False)
    _samples: int = attrs.field(default=0, init=False, repr=False)
    _tokens: int = attrs.field(default=0, init=False, repr=False)
    _flops: dict[str, Flops] = attrs.field(factory=dict, init=False, repr=False)
    _flops_seconds: float = attrs.field(default=0.0, init=False, repr=False)
    # detailed steps
    _detailed: int = attrs.field(default=0, init=False, repr=False)
    _detailed_seconds: float = attrs.field(default=0.0, init=False, repr=False)
    _places: dict[SpanKey, float] = attrs.field(factory=dict, init=False, repr=False)
    _rows: RowsBySize = attrs.field(factory=dict, init=False, repr=False)
    _kept: "deque[tuple[Sequence[Slice], Sequence[Event]]]" = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._timed = timed(self.step, lambda: self._spans)
        self._kept = deque(maxlen=self.settings.keep)

    def __call__(self, state: State, batch: Any, *, donate: bool = True) -> tuple[State, Metrics]:
        """One update, as a call of the step."""
        with self.call(state, batch) as step:
            return step(state, batch, donate=donate)

    @contextmanager
    def call(self, state: State, batch: Any) -> Iterator[Step]:
        """For loops that run a step's phases themselves: a context for one step, which gives the step to use.

        Args:
            state: before the update.
            batch: the step's whole batch, to count its rows and tokens.
        """
        if get_ident() != self._thread:
            raise RuntimeError(
                "profile: another thread has made this profile; call fds.profile(step) on each rank, in the function that "
                "comm.simulate or comm.spawn runs"
            )
        index, flops = self.made - self.settings.skip, self.settings.flops
        if index < 0:
            yield self.step
        else:
            rows = rows_of(batch)
            tokens = 0 if self.settings.tokens is None else int(self.settings.tokens(batch))
            counts, details = index == 0 and flops, (index - flops) % self.settings.every == 0
            if counts or details:
                self._shard = self.step.batch_shard(state)
            with self._counting() if counts else self._detailing() if details else self._passing() as step:
                yield step
            self._counted, self._samples, self._tokens = self._counted + 1, self._samples + rows, self._tokens + tokens
        self.made += 1

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Excludes what runs inside, an evaluation or a save, from the time between two steps."""
        self._plain.pause()
        yield

    def own(self) -> RankProfile:
        """This rank's figures so far."""
        self._plain.pause()
        detailed, plain, counted = max(self._detailed, 1), max(self._plain.count, 1), max(self._counted, 1)
        return RankProfile(
            rank=comm.world().rank,
            shard=self._shard,
            detailed=self._detailed,
            detailed_seconds=self._detailed_seconds / detailed,
            places={place: seconds / detailed for place, seconds in self._places.items()},
            plain=self._plain.count,
            plain_seconds=self._plain.seconds / plain,
            outside_seconds=self._plain.outside / plain,
            samples=self._samples / counted,
            tokens=None if self.settings.tokens is None else self._tokens / counted,
            flops=dict(self._flops),
            flops_seconds=self._flops_seconds,
            peak=self.settings.peak,
            calls=[attrs.evolve(row) for row in self._rows.values()],
            memory=MemoryStatus.now(),
            slices=[span for slices, _ in self._kept for span in slices],
            events=[event for _, events in self._kept for event in events],
        )

    def numbers(self) -> dict[str, float]:
        """This rank's figures for loggers."""
        return self.own().numbers()

    def result(self, group: comm.Group | None = None) -> Profile:
        """All ranks' figures, on one clock. Collective over the group, by default the world.

        Cost: an all-gather of the figures, and the messages of ``comm.debug.clock_offsets``.
        """
        offsets = comm.debug.clock_offsets(group)
        return Profile(str(self.step), comm.all_gather_object(self.own(), group), offsets.seconds, offsets.error)

    def finish(self) -> None:
        """Ends a run: rank 0 writes the figures of all ranks to the settings' folder, if there is one. Collective."""
        if self.settings.folder is not None:
            profile = self.result()
            if comm.world().rank == 0:
                profile.save(self.settings.folder)

    # -- how -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _passing(self) -> Iterator[Step]:
        with self._plain.step():
            yield self.step

    @contextmanager
    def _counting(self) -> Iterator[Step]:
        self._plain.pause(follows=True)
        spans = SpanClock()
        counter = ModuleFlops(lambda: spans.stage)
        step = timed(self.step, lambda: self._spans, around=counter.around)
        with self._measured_by(spans), counter:
            yield step
        self._flops, self._flops_seconds = counter.by_path, spans.seconds

    @contextmanager
    def _detailing(self) -> Iterator[Step]:
        self._plain.pause(follows=True)
        spans = SpanClock()
        book = WaitLedger(comm.world().rank, times=True, spans=spans)
        with opened(book), self._measured_by(spans):
            yield self._timed
        self._detailed += 1
        self._detailed_seconds += spans.seconds
        for place, seconds in spans.totals.items():
            self._places[place] = self._places.get(place, 0.0) + seconds
        add_by_size(self._rows, book.events)
        self._kept.append((spans.slices, book.events))

    @contextmanager
    def _measured_by(self, spans: SpanClock) -> Iterator[None]:
        with ExitStack() as after:
            self._spans = spans
            after.callback(partial(setattr, self, "_spans", None))
            after.enter_context(spans.step(str(self.step.name)))
            yield
