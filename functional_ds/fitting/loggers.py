"""Where a run's numbers go: CSV files, TensorBoard, or whatever has these three methods."""

import csv
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs

__all__ = ["CsvLog", "Journal", "Logger", "TensorBoard"]


class Logger(Protocol):
    """Takes numbers on rank 0. A run that was resumed or rolled back makes some steps again, and ``begin`` says so."""

    def begin(self, done: int) -> None:
        """What comes are steps after ``done``; what was logged for such before is void. 0 begins a new log."""
        ...

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """Numbers after so many steps."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


@attrs.define(eq=False)
class CsvLog:
    """A CSV file with a line for each number: step, name, value. Every line is in the file once it is logged.

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
        beside = self.path.with_name(f"{self.path.name}.new")
        with beside.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("step", "name", "value"), *kept])
        beside.replace(self.path)
        self._file = self.path.open("a", newline="", encoding="utf-8")

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """A line for each number."""
        csv.writer(self._file).writerows([done, name, value] for name, value in numbers.items())
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _kept(self, done: int) -> Iterator[list[str]]:
        """Whole lines up to a step; the last may have been cut off with the run."""
        whole = self.path.read_text(encoding="utf-8").rpartition("\n")[0]
        for row in csv.reader(whole.splitlines()):
            if len(row) == 3 and row[0].isdigit() and int(row[0]) <= done:
                yield row


@attrs.define(eq=False)
class TensorBoard:
    """Event files in a folder for TensorBoard; needs the extra ``fit``. TensorBoard hides what ``begin`` makes void."""

    folder: Path = attrs.field(converter=Path)
    _writer: Any = None

    def begin(self, done: int) -> None:
        """A new event file."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self.folder), purge_step=done + 1 if done else 0)

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """A point on each number's curve."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, done)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def checked(loggers: Iterable[Any]) -> tuple[Logger, ...]:
    """The loggers, each of which has the three methods.

    Raises:
        TypeError: one has not.
    """
    found = tuple(loggers)
    for logger in found:
        missing = [name for name in ("begin", "log", "close") if not callable(getattr(logger, name, None))]
        if missing:
            raise TypeError(
                f"loggers: {logger!r} has no {', '.join(missing)}; pass CsvLog(path), TensorBoard(folder), or alike"
            )
    return found


@attrs.define(eq=False)
class Journal:
    """The loggers and the bar of one run; on ranks that do not lead there are none.

    Attributes:
        loggers: where numbers go.
        every: how many steps lie between two logged ones.
        progress: whether there is a bar.
        steps: how many steps are to be made; None where nobody knows.
    """

    loggers: tuple[Logger, ...]
    every: int
    progress: bool
    steps: int | None
    _bar: Any = None
    _began: tuple[int, float] = (0, 0.0)

    def begin(self, done: int) -> None:
        """Steps after this one come."""
        for logger in self.loggers:
            logger.begin(done)
        self._began = done, time.perf_counter()
        if self.progress and self._bar is None:
            from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

            pause = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a file needs no animation
            self._bar = tqdm(total=self.steps, initial=done, unit="step", dynamic_ncols=True, mininterval=pause)
        elif self._bar is not None:
            self._bar.n = done
            self._bar.refresh()

    def due(self, done: int) -> bool:
        """Whether this step is logged, on every rank alike: each ``every``-th, and the last."""
        return done % self.every == 0 or done == self.steps

    def moved(self) -> None:
        """A step was made."""
        if self._bar is not None:
            self._bar.update()

    def log(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Reads a step's metrics, which waits for the device, and passes them on with the seconds that a step took."""
        if not self.loggers and self._bar is None:
            return
        before, began = self._began
        now = time.perf_counter()
        self._began = done, now
        numbers = {name: float(value) for name, value in metrics.items()}
        self._pass_on(done, {**numbers, "seconds_per_step": (now - began) / max(done - before, 1)})
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {numbers.get('loss', float('nan')):.4g}", refresh=False)

    def evaluated(self, done: int, found: Mapping[str, Any]) -> None:
        """Passes on what an evaluation found."""
        if self.loggers:
            self._pass_on(done, {name: float(value) for name, value in found.items()})

    def close(self) -> None:
        """Closes the loggers and the bar."""
        for logger in self.loggers:
            logger.close()
        if self._bar is not None:
            self._bar.close()

    def _pass_on(self, done: int, numbers: Mapping[str, float]) -> None:
        for logger in self.loggers:
            logger.log(done, numbers)
