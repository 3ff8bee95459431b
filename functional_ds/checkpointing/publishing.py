"""How a checkpoint comes into its folder, and how old ones go; for the job that holds the folder's lock."""

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from .errors import CheckpointError, DamagedError
from .folder import POINTER, hidden_place, place_of, pointer, read_pointer, replaced, summaries

__all__ = ["clean", "made", "publish", "retain", "staging", "write_whole"]

_SAVING, _DELETING = ".saving-", ".deleting-"


def staging(folder: Path) -> Path:
    """A new hidden folder to write a checkpoint into."""
    place = folder / f"{_SAVING}{uuid.uuid4().hex[:12]}"
    place.mkdir()
    return place


def clean(folder: Path) -> None:
    """Clears away what saves that died have left, and puts back what they were replacing."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith((_SAVING, _DELETING)):
            shutil.rmtree(entry, ignore_errors=True)
        elif (tag := replaced(entry.name)) is not None:
            place = folder / tag
            if place.exists():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.rename(place)


def publish(folder: Path, staged: Path, tag: str) -> None:
    """Makes a complete and fsynced folder the checkpoint ``tag``, and the newest.

    Whenever this ends, by whatever crash, each checkpoint is there whole or not at all, and ``latest`` names one that is.
    What needs room on the disk comes first, so that a full one leaves all as it was.
    """
    place, hidden = folder / tag, hidden_place(folder, tag)
    pointing = written_beside(folder / POINTER, pointer(tag))
    if place.exists():
        place.rename(hidden)
    staged.rename(place)
    sync_folder(folder)
    pointing.replace(folder / POINTER)
    sync_folder(folder)
    if hidden.exists():
        shutil.rmtree(hidden, ignore_errors=True)


def retain(folder: Path, tag: str, keep_last: int | None, keep_every: int | None) -> None:
    """Deletes what is too old of the checkpoints that may expire; never ``tag``, nor the one that ``latest`` names."""
    if keep_last is None:
        return
    with contextlib.suppress(DamagedError):
        safe = {tag, read_pointer(folder)}
        expiring = [summary for summary in summaries(folder) if summary.expires]
        for old in expiring[: max(0, len(expiring) - keep_last)]:
            if old.tag not in safe and not (keep_every and old.step % keep_every == 0):
                gone = folder / f"{_DELETING}{uuid.uuid4().hex[:12]}"
                place_of(folder, old.tag).rename(gone)  # so that no half of it is ever seen
                shutil.rmtree(gone, ignore_errors=True)


def write_whole(path: Path, data: bytes) -> None:
    """A small file, there whole or not at all, and on the disk when this returns."""
    written_beside(path, data).replace(path)
    sync_folder(path.parent)


def written_beside(path: Path, data: bytes) -> Path:
    """A small file on the disk that is to take the place of another; none where that fails."""
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return beside


def sync_folder(path: Path) -> None:
    """Names in a folder are on the disk when this returns; where folders cannot be synced, sooner or later."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def made(path: str | Path) -> Path:
    """The folder, made where it is not there.

    Raises:
        CheckpointError: it cannot be made, or has a folder where the pointer belongs.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"path={str(path)!r} cannot be made: {error.strerror}") from error
    if (folder / POINTER).is_dir():
        raise CheckpointError(f"{folder / POINTER} is a folder, and has to be the file that names the newest checkpoint")
    return folder
