"""A thread that carries out a group's asynchronous collectives while the caller computes."""

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

__all__ = ["Performed", "Posted", "Queued", "Worker"]


_IDLE = 5.0  # seconds: a thread without jobs ends after these; the next job starts a new one


@attrs.define(eq=False)
class Queued:
    """A job in the worker's queue. It waits by a lock, which takes a fraction of a ``Future``'s time.

    Attributes:
        worker: carries it out.
        ended: when it ended, without an error; None before that.
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
        """Returns its result or raises its error."""
        self.worker.check()
        with self._running:
            pass
        if self._error is not None:
            raise self._error
        return self._result

    def poll(self, timeout: float) -> bool:
        """Whether it has ended; waits up to ``timeout`` seconds for that."""
        self.worker.check()
        ended: bool = self._running.acquire(timeout=max(0.0, timeout))
        if ended:
            self._running.release()
        return ended

    def run(self) -> None:
        """Carries it out; ``wait`` raises what it raises."""
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
    """Runs a group's jobs in order on a thread of its own.

    Posting a message can block for milliseconds on Gloo's lock, and the second round of an all-reduce starts when the first one
    ends. On a separate thread neither delays the caller.

    Attributes:
        posted: the messages that the caller's thread has posted and not waited for.
        closed: whether there is no thread any more; a job is then run by who submits it.
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
        """Whether all jobs are done."""
        return not self._under_way

    @property
    def under_way(self) -> list[str]:
        """The calls whose jobs are not done, as text."""
        return [f"{shown()} on {self._group.name!r}" for shown in [*self._under_way.values()]]

    def submit(self, job: Callable[[], Any], shown: Callable[[], str]) -> Queued:
        """Queues a job, which is part of the call that ``shown`` gives as text."""
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
        """Takes a job that has ended off the list of those under way."""
        del self._under_way[queued]

    def perform(self, job: Callable[[], Tensor]) -> Performed:
        """Runs a job on the caller's thread; the worker must be idle."""
        try:
            result: Tensor | Exception = job()
        except Exception as error:  # raised again by ``wait``
            result = error
        return Performed(result, perf_counter())

    def close(self) -> None:
        """Lets the thread end after the jobs so far and all messages that are posted."""
        for reference in [*self.posted.values()]:
            posted = reference()
            if posted is not None:
                posted.look()
        with self._lock:
            self.closed = True
            self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds for the thread of a closed worker; returns whether it has ended."""
        thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join(max(0.0, timeout))
        return self._thread is None

    def disown(self, error: CommError) -> None:
        """Closes the worker of a forked process, which has no such thread: waits raise the error from now on."""
        self.closed, self._disowned = True, error
        self.posted.clear()

    def check(self) -> None:
        """Raises the error of a worker that a forked process has from its parent."""
        if self._disowned is not None:
            raise self._disowned

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
            found.run()
            del found  # otherwise the last result stays in memory until the next job
