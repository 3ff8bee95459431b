"""One job at a time saves into a folder."""

import contextlib
import json
import os
import socket
import time
from pathlib import Path

import attrs

from .directory import LOCK
from .errors import BusyError, CheckpointError

__all__ = ["Lock"]

_PATIENCE = 10.0  # seconds: children of a job that was killed may hold its lock a little longer than itself
_PAUSE = 0.1


@attrs.define(eq=False)
class Lock:
    """A folder's lock, which the system takes from a process that ends, however it does."""

    path: Path
    handle: int

    @staticmethod
    def take(folder: Path, patience: float = _PATIENCE) -> "Lock":
        """The lock, once nobody else has it.

        Raises:
            BusyError: somebody does; the message says who. If it is this process itself, waiting would not help.
            CheckpointError: the folder is not writable.
        """
        path = folder / LOCK
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CheckpointError(f"{folder} is not writable: {error.strerror}") from error
        until, own = time.monotonic() + patience, _note()
        while not _held(handle):
            if os.pread(handle, 4096, 0) == own:
                os.close(handle)
                raise BusyError(
                    f"{folder}: a Saver of this process is open here, fit's perhaps; save with it, or into another folder"
                )
            if time.monotonic() > until:
                owner = _owner(handle)
                os.close(handle)
                raise BusyError(
                    f"{folder}: another job saves here ({owner}); give each job a folder of its own, or end the other one"
                )
            time.sleep(_PAUSE)
        with contextlib.suppress(OSError):  # a note for people; a full disk is reported by what is written next
            os.ftruncate(handle, 0)
            os.pwrite(handle, own, 0)
        return Lock(path, handle)

    def release(self) -> None:
        """Lets others save."""
        if self.handle >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self.handle, 0)
            _free(self.handle)  # closing is not enough where a process that was forked meanwhile has it open, too
            os.close(self.handle)
            self.handle = -1


def _note() -> bytes:
    """Who this process is."""
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()


def _held(handle: int) -> bool:
    try:
        import fcntl
    except ImportError:  # where the system has no such locks, jobs must keep apart by themselves
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free(handle: int) -> None:
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_UN)


def _owner(handle: int) -> str:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it left no name"
