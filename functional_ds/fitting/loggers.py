"""Loggers: the console, CSV files, TensorBoard, or any object with the methods of ``Logger``."""

import csv
import io
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import attrs

from functional_ds.base.disk.files import read_regular, write_atomically
from functional_ds.comm.record.notebook import progress_bar
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .checks import check_steps

_LONGEST_LOG = 2**30  # bytes of a CSV file that a resumed run reads


class Logger(Protocol):
    """Receives numbers on rank 0. Resumed or rolled-back runs repeat steps, which ``begin`` announces."""

    def begin(self, done: int) -> None:
        """Steps after ``done`` follow; earlier logs of such steps are void. 0 begins a new log."""
        ...

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """Logs numbers after ``done`` steps."""
        ...

    def close(self) -> None:
        """Ends the log."""
        ...


@attrs.frozen
class Console:
    """Prints a line for each logged step, without names that contain a slash. The default of ``Logging``.

    >>> Console().log(10, {"loss": 0.51234, "seconds_per_step": 0.002})
    step 10: loss 0.5123, seconds_per_step 0.002
    """

    def begin(self, done: int) -> None:
        """Prints after which step a run resumes."""
        if done:
            sys.stdout.write(f"resumes after step {done}\n")

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """Prints a line."""
        shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if "/" not in name)
        sys.stdout.write(f"step {done}: {shown}\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Does nothing."""


@attrs.define(eq=False)
class CsvLog:
    """A CSV file with a line for each number: step, name, value. Lines are flushed as they are logged.

    Raises:
        OSError: in ``begin`` of a resumed run: the file is not a regular file, or has more than 1 GiB.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = CsvLog(Path(folder, "log.csv"))
    ...     log.begin(0)
    ...     log.log(1, {"loss": 0.5})
    ...     log.close()
    ...     print(Path(folder, "log.csv").read_text().split())
    ['step,name,value', '1,loss,0.5']
    """

    path: Path = attrs.field(converter=Path)
    _file: Any = None

    def begin(self, done: int) -> None:
        """Keeps the lines up to that step."""
        self.close()
        kept = list(self._kept(done)) if done and self.path.exists() else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("step", "name", "value"), *kept])
        write_atomically(self.path, text.getvalue().encode())
        self._file = self.path.open("a", newline="", encoding="utf-8")

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """Writes a line for each number."""
        csv.writer(self._file).writerows([done, name, value] for name, value in numbers.items())
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _kept(self, done: int) -> Iterator[list[str]]:
        """Complete lines up to a step; the last line may be incomplete if the run was killed."""
        whole = read_regular(self.path, limit=_LONGEST_LOG).decode("utf-8", "replace").rpartition("\n")[0]
        for row in csv.reader(line for line in whole.splitlines() if len(line) < csv.field_size_limit()):
            if len(row) == 3 and row[0].isdecimal() and len(row[0]) < 20 and int(row[0]) <= done:
                yield row


@attrs.define(eq=False)
class TensorBoard:
    """Event files for TensorBoard in a folder; needs the extra ``fit``. TensorBoard hides what ``begin`` voids."""

    folder: Path = attrs.field(converter=Path)
    _writer: Any = None

    def begin(self, done: int) -> None:
        """Begins a new event file."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self.folder), purge_step=done + 1 if done else 0)

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """Adds a point to each number's curve."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, done)

    def close(self) -> None:
        """Writes what is buffered."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@attrs.define(eq=False)
class WandB:
    """A Weights & Biases run; needs the package ``wandb``. Points are indexed by step, so steps may repeat.

    Attributes:
        project: its name.
        options: further arguments of ``wandb.init``; an ``id`` lets a resumed run continue in the same one.
    """

    project: str
    options: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    _run: Any = None

    def begin(self, done: int) -> None:
        """Opens the run, once."""
        if self._run is not None:
            return
        import wandb  # type: ignore[import-not-found, unused-ignore]

        self._run = wandb.init(project=self.project, **{"resume": "allow", **self.options})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """Adds a point to each number's curve."""
        self._run.log({**numbers, "step": done})

    def close(self) -> None:
        """Ends the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


@attrs.define(eq=False)
class Comet:
    """A Comet experiment; needs the package ``comet_ml``, whose configuration provides the defaults.

    Attributes:
        name: of the experiment; None for one that Comet chooses.
        options: further arguments of ``comet_ml.start``.
        every: the steps between two points of one name; 0 for all points.
    """

    name: str | None = None
    options: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    every: int = attrs.field(default=0, kw_only=True)
    _experiment: Any = None
    _last: dict[str, int] = attrs.field(factory=dict)

    def begin(self, done: int) -> None:
        """Opens the experiment, once."""
        self._last = {name: at for name, at in self._last.items() if at <= done}
        if self._experiment is not None:
            return
        import comet_ml  # type: ignore[import-not-found, unused-ignore]

        self._experiment = comet_ml.start(**self.options)
        if self.name is not None:
            self._experiment.set_name(self.name)

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """Adds a point to each number's curve, if its last one is at least ``every`` steps ago."""
        for name, value in numbers.items():
            if name not in self._last or done - self._last[name] >= self.every:
                self._last[name] = done
                self._experiment.log_metric(name, value, step=done)

    def close(self) -> None:
        """Ends the experiment."""
        if self._experiment is not None:
            self._experiment.end()
            self._experiment = None


class MeasuredStep(Protocol):
    """A step that measures itself, from ``fds.profile``."""

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One update."""
        ...

    def numbers(self) -> Mapping[str, float]:
        """What was measured so far, for loggers."""
        ...

    def apart(self) -> AbstractContextManager[None]:
        """Excludes what runs inside from the measurement."""
        ...

    def finish(self) -> None:
        """Ends the run, on all ranks."""
        ...


class StepMeasure(Protocol):
    """Makes a step measure itself: ``fds.profiling.Profiling``."""

    def start(self, step: Step) -> MeasuredStep:
        """The measured step, on each rank."""
        ...


def checked(loggers: Iterable[Any]) -> tuple[Logger, ...]:
    """The loggers, if each has the three methods.

    Raises:
        TypeError: one lacks a method.
    """
    valid = tuple(loggers)
    for logger in valid:
        missing = [name for name in ("begin", "log", "close") if not callable(getattr(logger, name, None))]
        if missing:
            raise TypeError(
                f"loggers: {logger!r} has no {', '.join(missing)}; pass CsvLog(path), TensorBoard(folder), or alike"
            )
    return valid


@attrs.frozen
class Logging:
    """Where ``fit`` logs, and how often.

    Attributes:
        loggers: ``Console()`` by default; ``CsvLog(path)``, ``TensorBoard(folder)``, or your own objects; () for none. Used on
            rank 0.
        every: the steps between two whose metrics are read and logged. Other steps do not wait for the device.
        progress: whether rank 0 shows a progress bar; needs the extra ``fit``.
        profile: ``fds.profiling.Profiling(folder=...)``: measures steps; its numbers are logged with the metrics.

    >>> Logging(every=100).every
    100
    """

    loggers: tuple[Logger, ...] = attrs.field(default=(Console(),), converter=checked)
    every: int = attrs.field(default=10, kw_only=True)
    progress: bool = attrs.field(default=False, kw_only=True)
    profile: StepMeasure | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_steps("every", self.every, optional=False)
        if self.profile is not None and not callable(getattr(self.profile, "start", None)):
            raise TypeError(f"profile={self.profile!r}: pass fds.profiling.Profiling(), or None")


@attrs.define(eq=False)
class MetricLogger:
    """The loggers and the bar of one run.

    Attributes:
        policy: which, and how often.
        steps: the number of steps in all; None if it is open.
        active: whether this rank logs.
        measured: the step, if it measures itself.
    """

    policy: Logging
    steps: int | None
    active: bool = attrs.field(kw_only=True)
    measured: MeasuredStep | None = attrs.field(default=None, kw_only=True)
    _bar: Any = None
    _last: tuple[int, float] = (0, 0.0)  # the number of steps at the last log, and when that was

    @property
    def loggers(self) -> tuple[Logger, ...]:
        """Those of this rank."""
        return self.policy.loggers if self.active else ()

    def begin(self, done: int) -> None:
        """Steps after ``done`` follow."""
        for logger in self.loggers:
            logger.begin(done)
        self._last = done, time.perf_counter()
        if self.policy.progress and self.active and self._bar is None:
            self._bar = progress_bar(total=self.steps, done=done)
        elif self._bar is not None:
            self._bar.n = done
            self._bar.refresh()

    def due(self, done: int) -> bool:
        """Whether this step is logged, equal on all ranks: each ``every``-th, and the last."""
        return done % self.policy.every == 0 or done == self.steps

    def moved(self) -> None:
        """Counts a step."""
        if self._bar is not None:
            self._bar.update()

    def log(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Logs a step's metrics, and the seconds per step since the last log. Reading metrics waits for the device."""
        if not self.loggers and self._bar is None:
            return
        numbers = {name: float(value) for name, value in metrics.items()}  # first, for the device may be behind
        (before, then), now = self._last, time.perf_counter()
        self._last = done, now
        numbers["seconds_per_step"] = (now - then) / max(done - before, 1)
        self._pass_on(done, {**numbers, **({} if self.measured is None else self.measured.numbers())})
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {numbers.get('loss', float('nan')):.4g}", refresh=False)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Excludes what runs inside, an evaluation or a save, from the seconds per step."""
        began = time.perf_counter()
        with nullcontext() if self.measured is None else self.measured.apart():
            yield
        done, then = self._last
        self._last = done, then + time.perf_counter() - began

    def evaluated(self, done: int, numbers: Mapping[str, Any]) -> None:
        """Logs an evaluation's numbers."""
        if self.loggers:
            self._pass_on(done, {name: float(value) for name, value in numbers.items()})

    def close(self) -> None:
        """Closes the loggers and the bar."""
        for logger in self.loggers:
            logger.close()
        if self._bar is not None:
            self._bar.close()

    def _pass_on(self, done: int, numbers: Mapping[str, float]) -> None:
        for logger in self.loggers:
            logger.log(done, numbers)
