"""A thread that carries out one group's exchanges, so that whoever started them computes on."""

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import RLock, Thread
from time import perf_counter

import attrs
from torch import Tensor

__all__ = ["Performed", "Posted", "Queued", "Worker"]


_IDLE = 5.0  # seconds without a job after which the thread ends; the next job starts another


@attrs.frozen(eq=False)
class Queued:
    """An exchange that the worker does when its turn comes."""

    future: "Future[tuple[Tensor, float]]"

    @property
    def ended(self) -> float | None:
        """When it was over; None before."""
        return self.future.result()[1] if self.future.done() and not self.future.exception() else None

    def wait(self) -> Tensor:
        """Its result, or its error."""
        return self.future.result()[0]

    def poll(self, timeout: float) -> bool:
        """Whether it is over; waits for that at most ``timeout`` seconds."""
        return bool(wait_for([self.future], timeout).done)


@attrs.frozen(eq=False)
class Performed:
    """An exchange that is over."""

    result: Tensor | Exception
    ended: float

    def wait(self) -> Tensor:
        """Its result, or its error."""
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def poll(self, timeout: float) -> bool:
        """True."""
        return True


@attrs.define(eq=False)
class Posted:
    """A message that the caller's thread has posted, and the transport moves.

    Whether it is over can only be found by waiting. So a look leaves that to the worker, and so does dropping it, for the
    transport forgets messages that nobody holds.
    """

    worker: "Worker"
    finish: Callable[[], Tensor]
    ended: float | None = None
    _looked: Queued | None = None
    _waited: bool = False

    def wait(self) -> Tensor:
        """Its result, or its error."""
        if self._looked is not None:
            return self._looked.wait()
        self._waited = True
        result = self.finish()
        self.ended = perf_counter()
        return result

    def poll(self, timeout: float) -> bool:
        """Whether it is over; waits for that at most ``timeout`` seconds."""
        if self.ended is not None:
            return True
        if self._looked is None:
            self._looked = self.worker.submit(self.finish)
        if self._looked.poll(timeout):
            self.ended = self._looked.ended
            return True
        return False

    def __del__(self) -> None:
        if not self._waited and self._looked is None:
            with suppress(RuntimeError):  # at the interpreter's end no thread can be started
                self.worker.submit(self.finish)


class Worker:
    """Does what it is given one after the other.

    Posting a message takes the lock under which the transport moves the previous one, which can last milliseconds, and the
    second half of an all-reduce starts when the first is over; on a thread of their own neither holds up the caller.
    """

    def __init__(self, name: str) -> None:
        self._lock = RLock()  # what is dropped within it may come back to it
        self._jobs: SimpleQueue[tuple[Callable[[], Tensor], Future[tuple[Tensor, float]]]] = SimpleQueue()
        self._given = self._done = 0
        self._name = name
        self._thread: Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all it was given is done."""
        return self._given == self._done

    def submit(self, job: Callable[[], Tensor]) -> Queued:
        """Queues a job."""
        future: Future[tuple[Tensor, float]] = Future()
        with self._lock:
            self._given += 1
            self._jobs.put((job, future))
            if self._thread is None:
                self._thread = Thread(target=self._run, daemon=True, name=f"worker {self._name}")
                self._thread.start()
        return Queued(future)

    def perform(self, job: Callable[[], Tensor]) -> Performed:
        """Does a job on the caller's thread; the worker must be idle."""
        try:
            result: Tensor | Exception = job()
        except Exception as error:  # whoever waits shall see it
            result = error
        return Performed(result, perf_counter())

    def _run(self) -> None:
        while True:
            try:
                job, future = self._jobs.get(timeout=_IDLE)
            except Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            try:
                future.set_result((job(), perf_counter()))
            except BaseException as error:  # whoever waits shall see it
                future.set_exception(error)
            self._done += 1
            del job, future  # or the last result would live until the next job
