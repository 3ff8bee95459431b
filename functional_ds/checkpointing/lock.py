"""A lock, so that only one job at a time saves into a folder."""

import time
from pathlib import Path

from functional_ds.base.disk.files import FileLock, process_note
from functional_ds.state_dict.errors import BusyError, CheckpointError

LOCK = ".lock"
_PATIENCE = 10.0  # seconds; child processes of a killed job may hold its lock a little longer than the job
_PAUSE = 0.1


def take_lock(folder: Path) -> FileLock:
    """Waits briefly for the folder's lock, which the kernel releases when this process ends.

    Raises:
        BusyError: another job, or another Saver of this process, has it; says which.
        CheckpointError: the folder is not writable.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            lock = FileLock.take(folder / LOCK)
        except OSError as error:
            raise CheckpointError(f"{folder} is not writable; {LOCK}: {error.strerror}") from error
        if lock is not None:
            return lock
        owner = FileLock.owner(folder / LOCK)
        if owner == process_note():  # waiting would not help
            raise BusyError(
                f"{folder}: a Saver of this process is open here, fit's perhaps; save with it, or into another folder"
            )
        if time.monotonic() > deadline:
            who = "it left no name" if owner is None else f"process {owner['pid']} on {owner['host']}"
            raise BusyError(
                f"{folder}: another job saves here ({who}); give each job a folder of its own, or end the other one"
            )
        time.sleep(_PAUSE)
