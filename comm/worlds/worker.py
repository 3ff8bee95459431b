"""A thread that performs a group's asynchronous collectives while the caller computes."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, RLock, Thread, current_thread
from time import perf_counter
from typing import Any
from weakref import ReferenceType, ref

import attrs
from torch import Tensor

from functional_ds.comm.record.group import Group
from functional_ds.comm.table.errors import CommError

_IDLE = 5.0  # seconds after which a thread without jobs ends; the next job starts a new one


@attrs.define(eq=False)
class Queued:
    """A job in the worker's queue; waits with a lock, which is several times faster than a ``Future``.

    Attributes:
        worker: runs it.
        ended: when it ended without an error; None before that.
    """

    worker: "Worker"
    _job: Callable[[], Any] | None
    ended: float | None = None
    _result: Any = None
    _error: BaseException | None = None
    _running: Any = attrs.field(factory=Lock, init=False)  # held until the job has ended

    def __attrs_post_init__(self) -> None:
        self._running.acquire()

    def wait(self) -> Any:
        """Returns the result or raises the error."""
        self.worker.check()
        with self._running:
            pass
        if self._error is not None:
            raise self._error
        return self._result

    def poll(self, timeout: float) -> bool:
        """Whether it has ended; waits up to ``timeout`` seconds."""
        self.worker.check()
        ended: bool = self._running.acquire(timeout=max(0.0, timeout))
        if ended:
            self._running.release()
        return ended

    def run(self) -> None:
        """Runs the job; ``wait`` raises its error."""
        if self._job is not None:
            try:
                self._result = self._job()
                self.ended = perf_counter()
            except BaseException as error:
                self._error = error
        self._job = None  # it holds tensors
        self.worker.forget(self)
        self._running.release()


@attrs.frozen(eq=False)
class Performed:
    """A job that has already run.

    Attributes:
        result: its result or error.
        ended: when it ended.
    """

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
    """A message that was posted on the caller's thread.

    Gloo cannot tell whether a message has ended except by waiting for it, so ``poll`` makes the worker wait. So does deleting
    the record, since Gloo drops messages whose work objects are deleted.
    """

    worker: "Worker"
    shown: Callable[[], str]
    finish: Callable[[], Tensor]
    ended: float | None = None
    _looked: Queued | None = None

    def __attrs_post_init__(self) -> None:
        self.worker.posted[id(self)] = ref(self)

    def wait(self) -> Tensor:
        """Returns its result or raises its error."""
        if self._looked is not None:
            return self._looked.wait()  # type: ignore[no-any-return]
        self.worker.check()
        self.worker.posted.pop(id(self), None)
        result = self.finish()
        self.ended = perf_counter()
        return result

    def poll(self, timeout: float) -> bool:
        """Whether it has ended; waits up to ``timeout`` seconds for that."""
        if self.ended is not None:
            return True
        looked = self.look()
        if looked.poll(timeout):
            self.ended = looked.ended
            return True
        return False

    def look(self) -> Queued:
        """Makes the worker wait for it."""
        if self._looked is None:
            self.worker.posted.pop(id(self), None)
            self._looked = self.worker.submit(self.finish, self.shown)
        return self._looked

    def __del__(self) -> None:
        if self.worker.posted.pop(id(self), None) is not None and not self.worker.closed:
            self.worker.submit(self.finish, self.shown)


class Worker:
    """Runs a group's jobs in order on a separate thread.

    Posting a message can block for milliseconds on Gloo's lock, and the second round of an all-reduce starts when the first
    ends. On a separate thread neither delays the caller.

    Attributes:
        posted: messages that the caller's thread has posted and not waited for.
        closed: whether the thread has ended or is about to; ``submit`` then runs jobs on the caller's thread.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lock = RLock()  # reentrant: a record that is dropped under it submits a job
        self._jobs: SimpleQueue[Queued | None] = SimpleQueue()
        self._under_way: dict[Queued, Callable[[], str]] = {}
        self._thread: Thread | None = None
        self._disowned: CommError | None = None
        self.posted: dict[int, ReferenceType[Posted]] = {}
        self.closed = False

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""
        return not self._under_way

    @property
    def under_way(self) -> list[str]:
        """The calls whose jobs have not ended, as text."""
        return [f"{shown()} on {self._group.name!r}" for shown in [*self._under_way.values()]]

    def submit(self, job: Callable[[], Any], shown: Callable[[], str]) -> Queued:
        """Queues a job; ``shown`` gives its call as text."""
        queued = Queued(self, job)
        with self._lock:
            self._under_way[queued] = shown
            if not self.closed:
                self._jobs.put(queued)
                if self._thread is None:
                    self._thread = Thread(target=self._run, daemon=True, name=f"worker {self._group.name}")
                    self._thread.start()
                return queued
        queued.run()
        return queued

    def forget(self, queued: Queued) -> None:
        """Removes a job that has ended from ``under_way``."""
        del self._under_way[queued]

    def perform(self, job: Callable[[], Tensor]) -> Performed:
        """Runs a job on the caller's thread; the worker must be idle."""
        try:
            result: Tensor | Exception = job()
        except Exception as error:  # raised again by ``wait``
            result = error
        return Performed(result, perf_counter())

    def close(self) -> None:
        """Lets the thread end after the queued jobs and posted messages."""
        for reference in [*self.posted.values()]:
            posted = reference()
            if posted is not None:
                posted.look()
        with self._lock:
            self.closed = True
            self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds for a closed worker's thread; returns whether it has ended."""
        thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join(max(0.0, timeout))
        return self._thread is None

    def disown(self, error: CommError) -> None:
        """Closes the worker in a forked process, where its thread does not exist: later waits raise the error."""
        self.closed, self._disowned = True, error
        self.posted.clear()

    def check(self) -> None:
        """Raises the error given to ``disown``, if any."""
        if self._disowned is not None:
            raise self._disowned

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE)
            except Empty:
                job = None
            if job is None:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            job.run()
            del job  # otherwise the last result stays in memory until the next job
