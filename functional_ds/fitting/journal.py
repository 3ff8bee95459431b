"""What a run says of itself: numbers to the loggers and a progress bar, on rank 0 alone."""

import sys
import time
from collections.abc import Mapping
from typing import Any

import attrs

from .logs import Logger

__all__ = ["Journal"]


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
