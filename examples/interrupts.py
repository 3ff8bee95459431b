"""Ctrl-C as a flag that a training loop asks for, so that its ranks can agree after which step they stop."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from types import FrameType
from typing import Protocol


class Flag(Protocol):
    """What the loop sees: an event, of this process or shared by several."""

    def is_set(self) -> bool: ...


@contextmanager
def noted_here() -> Iterator[Flag]:
    """In this process the first interrupt sets the flag, and a second ends the process."""
    flag = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        flag.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def noted_for_ranks() -> Iterator[Flag]:
    """For the processes started within: the first interrupt sets the flag for all of them, a second ends them.

    A terminal sends SIGINT to this process and to every rank at once, whatever each is doing: starting Python, say, where
    no handler stands yet. So this thread blocks it, which the processes that it starts inherit. Another thread of this
    process, which does not, learns of it through a pipe.
    """
    # Made first: its semaphore starts multiprocessing's resource tracker, and that start would unblock the signal.
    flag = get_context("spawn").Event()
    arrived, arrives = os.pipe()
    os.set_blocking(arrives, False)

    def watch() -> None:
        while number := os.read(arrived, 1):
            if number[0] != signal.SIGINT:
                continue
            for rank in active_children() if flag.is_set() else ():
                rank.terminate()
            flag.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    handler = signal.signal(signal.SIGINT, lambda number, frame: None)  # the pipe is written to where a handler stands
    pipe = signal.set_wakeup_fd(arrives)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield flag
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(pipe)
        signal.signal(signal.SIGINT, handler)
        os.close(arrives)
        watcher.join()
        os.close(arrived)
