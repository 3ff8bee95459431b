"""Times unprofiled steps, from one to the next."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import attrs

from functional_ds.base.device import in_use, synchronize


@attrs.define(eq=False)
class PlainSteps:
    """Counts plain steps and their time, without synchronisation between consecutive ones.

    On a device the host waits before the first and after the last of consecutive steps.

    Attributes:
        clock: in seconds.
        count: the number of steps.
        seconds: their time, including that between two of them.
        outside: the host's time between two of them, a part of ``seconds``.
    """

    clock: Callable[[], float] = perf_counter
    count: int = 0
    seconds: float = 0.0
    outside: float = 0.0
    _since: float | None = None  # steps have followed each other; None between rows
    _ended: float = 0.0  # the last step, for the host

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step; a failed one does not count, and ends the row."""
        if self._since is None:
            wait_for_device()
            self._since = self._ended = self.clock()
        between = self.clock() - self._ended
        try:
            yield
        except BaseException:
            self.pause()
            raise
        self.outside += between
        self.count, self._ended = self.count + 1, self.clock()

    def pause(self, *, follows: bool = False) -> None:
        """Ends the row. If a profiled step ``follows``, the time since the last one is between two steps."""
        if self._since is None:
            return
        now = self.clock() if follows else self._ended
        self.outside += now - self._ended
        if in_use() is not None:
            wait_for_device()
            now = self.clock()
        self.seconds += now - self._since
        self._since = None


def wait_for_device() -> None:
    """Waits for all work of the accelerator in use."""
    device = in_use()
    if device is not None:
        synchronize([device])
