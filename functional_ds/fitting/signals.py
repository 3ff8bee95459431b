"""Signals set a flag that a training loop reads, so that its ranks can agree on the step after which they stop."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from types import FrameType
from typing import Protocol

import attrs

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Flag(Protocol):
    """An event of this process, or one that several share. ``number``, if present, is the signal that set it."""

    def is_set(self) -> bool: ...


@attrs.define(eq=False)
class _SignalFlag:
    """A flag with the number of the signal that set it."""

    number: int = 0

    def is_set(self) -> bool:
        return self.number != 0


@contextmanager
def stop_on_signals() -> Iterator[Flag]:
    """A context in which the first SIGINT or SIGTERM sets the flag, and a second one of the same signal ends the process.

    Only the main thread can handle signals; on other threads the flag is never set.

    >>> with stop_on_signals() as stop:
    ...     for step in range(3):
    ...         if stop.is_set():
    ...             break
    >>> step
    2
    """
    flag = _SignalFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def note(number: int, frame: FrameType | None) -> None:
        flag.number = flag.number or number
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_ranks_on_signals() -> Iterator[Flag]:
    """For processes started within the block: the first interrupt sets the flag in all of them, a second ends them.

    A terminal sends SIGINT to this process and to every rank, perhaps while a rank is starting and has no handler yet. So this
    thread blocks SIGINT, which the processes that it starts inherit. Another thread of this process receives it through a pipe.
    SIGTERM to this process counts as an interrupt too.
    """
    # Comes first: its semaphore starts multiprocessing's resource tracker, and that start would unblock the signal.
    flag = get_context("spawn").Event()
    arrived, arrives = os.pipe()
    os.set_blocking(arrives, False)

    def watch() -> None:
        while number := os.read(arrived, 1):
            if number[0] not in _SIGNALS:
                continue
            for rank in active_children() if flag.is_set() else ():
                rank.terminate()
            flag.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    # Python writes to the pipe only for signals that have a handler.
    handlers = {number: signal.signal(number, lambda number, frame: None) for number in _SIGNALS}
    pipe = signal.set_wakeup_fd(arrives)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield flag
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(pipe)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(arrives)
        watcher.join()
        os.close(arrived)
