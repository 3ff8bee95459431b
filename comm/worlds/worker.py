"""A thread that carries out a group's asynchronous collectives while the caller computes."""

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import RLock, Thread, current_thread
from time import perf_counter
from typing import Any

import attrs
from torch import Tensor

__all__ = ["Performed", "Posted", "Queued", "Worker"]


_IDLE = 5.0  # seconds: a thread without jobs ends after these; the next job starts a new one


@attrs.frozen(eq=False)
class Queued:
    """A job in the worker's queue."""

    future: "Future[tuple[Any, float]]"

    @property
    def ended(self) -> float | None:
        """When it ended; None before that."""
        return self.future.result()[1] if self.future.done() and not self.future.exception() else None

    def wait(self) -> Any:
        """Returns its result or raises its error."""
        return self.future.result()[0]

    def poll(self, timeout: float) -> bool:
        """Whether it has ended; waits up to ``timeout`` seconds for that."""
        return bool(wait_for([self.future], timeout).done)


@attrs.frozen(eq=False)
class Performed:
    """A job that has ended."""

    result: Tensor | Exception
    ended: float

    def wait(self) -> Tensor:
        """Returns its result or raises its error."""
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def poll(self, timeout: float) -> bool:
        """True."""
        return True


@attrs.define(eq=False)
class Posted:
    """A message that the caller's thread has posted.

    Gloo has no way to ask whether a message has ended except to wait. So ``poll`` makes the worker wait for it. Dropping the
    record does so, too, since Gloo drops messages whose works are not held.
    """

    worker: "Worker"
    finish: Callable[[], Tensor]
    ended: float | None = None
    _looked: Queued | None = None
    _waited: bool = False

    def wait(self) -> Tensor:
        """Returns its result or raises its error."""
        if self._looked is not None:
            return self._looked.wait()  # type: ignore[no-any-return]
        self._waited = True
        result = self.finish()
        self.ended = perf_counter()
        return result

    def poll(self, timeout: float) -> bool:
        """Whether it has ended; waits up to ``timeout`` seconds for that."""
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
    """Runs jobs in order on a thread of its own.

    Posting a message can block for milliseconds on Gloo's lock, and the second round of an all-reduce starts when the first one
    ends. On a separate thread neither delays the caller.
    """

    def __init__(self, name: str) -> None:
        self._lock = RLock()  # reentrant: a record that is dropped under it submits a job
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[tuple[Any, float]]] | None] = SimpleQueue()
        self._given = self._done = 0
        self._name = name
        self._thread: Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all jobs are done."""
        return self._given == self._done

    def submit(self, job: Callable[[], Any]) -> Queued:
        """Queues a job."""
        future: Future[tuple[Any, float]] = Future()
        with self._lock:
            self._given += 1
            self._jobs.put((job, future))
            if self._thread is None:
                self._thread = Thread(target=self._run, daemon=True, name=f"worker {self._name}")
                self._thread.start()
        return Queued(future)

    def perform(self, job: Callable[[], Tensor]) -> Performed:
        """Runs a job on the caller's thread; the worker must be idle."""
        try:
            result: Tensor | Exception = job()
        except Exception as error:  # raised again by ``wait``
            result = error
        return Performed(result, perf_counter())

    def close(self, timeout: float) -> None:
        """Ends the thread after the jobs so far.

        An interpreter that exits ends a thread wherever it is, and torch aborts the process if that is in its C++ code.

        Args:
            timeout: the seconds to wait for the thread, which may wait for another rank.
        """
        thread = self._thread
        if thread is not None and thread is not current_thread():
            self._jobs.put(None)
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            try:
                found = self._jobs.get(timeout=_IDLE)
            except Empty:
                found = None
            if found is None:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            job, future = found
            del found
            try:
                future.set_result((job(), perf_counter()))
            except BaseException as error:  # raised again by ``wait``
                future.set_exception(error)
            self._done += 1
            del job, future  # otherwise the last result stays in memory until the next job
