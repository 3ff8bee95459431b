"""Ctrl-C as a flag that a training loop asks for, so that its ranks can agree after which step they stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from types import FrameType
from typing import Protocol

SIGINT = {signal.SIGINT}


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

    A terminal sends SIGINT to this process and to every rank at once, whatever each is doing: starting Python, say,
    where no handler stands yet. So it is blocked here, which the ranks inherit, and a thread of this process awaits it.
    """
    # Made first: its semaphore starts multiprocessing's resource tracker, and that start would unblock the signal.
    flag = get_context("spawn").Event()
    over = threading.Event()

    def watch() -> None:
        while signal.sigwait(SIGINT) and not over.is_set():
            for rank in active_children() if flag.is_set() else ():
                rank.terminate()
            flag.set()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGINT)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield flag
    finally:
        over.set()
        signal.pthread_kill(watcher.ident or 0, signal.SIGINT)
        watcher.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
