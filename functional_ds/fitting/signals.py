"""Signals as a flag that a training loop asks for, so that its ranks can agree after which step they stop."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from types import FrameType
from typing import Protocol

import attrs

__all__ = ["Flag", "noted_for_ranks", "noted_here"]

_NOTED = (signal.SIGINT, signal.SIGTERM)


class Flag(Protocol):
    """What a loop sees: an event, of this process or shared by several. ``number``, if it has one, says which signal."""

    def is_set(self) -> bool: ...


@attrs.define(eq=False)
class _Noted:
    """A flag with the number of the signal that set it."""

    number: int = 0

    def is_set(self) -> bool:
        return self.number != 0


@contextmanager
def noted_here() -> Iterator[Flag]:
    """In this process the first SIGINT or SIGTERM sets the flag, and a second of its kind ends the process.

    Signals reach the main thread alone. On another one nothing is noted.
    """
    flag = _Noted()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def note(number: int, frame: FrameType | None) -> None:
        flag.number = flag.number or number
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in _NOTED}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def noted_for_ranks() -> Iterator[Flag]:
    """For the processes started within: the first interrupt sets the flag for all of them, a second ends them.

    A terminal sends SIGINT to this process and to every rank at once, whatever each is doing: starting Python, say, where
    no handler stands yet. So this thread blocks it, which the processes that it starts inherit. Another thread of this
    process, which does not, learns of it through a pipe. SIGTERM to this process counts as an interrupt, too.
    """
    # Made first: its semaphore starts multiprocessing's resource tracker, and that start would unblock the signal.
    flag = get_context("spawn").Event()
    arrived, arrives = os.pipe()
    os.set_blocking(arrives, False)

    def watch() -> None:
        while number := os.read(arrived, 1):
            if number[0] not in _NOTED:
                continue
            for rank in active_children() if flag.is_set() else ():
                rank.terminate()
            flag.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    # The pipe is written to where a handler stands.
    handlers = {number: signal.signal(number, lambda number, frame: None) for number in _NOTED}
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
