"""A folder of checkpoints: its entries, and which checkpoint is the newest.

```
folder/latest             the tag of the newest, and its checksum
folder/1000/              a checkpoint: manifest.json and data files
folder/.saving-…          a checkpoint that is being written
folder/.replaced-1000     a checkpoint being replaced by one of the same tag
folder/.lock              locked by the job that saves here
```
"""

import contextlib
import os
import shutil
import time
import uuid
import zlib
from pathlib import Path

import attrs

from functional_ds.base.disk.files import FileLock, checked_path, process_note, read_regular, sync_folder, write_synced
from functional_ds.state_dict.errors import BusyError, CheckpointError, DamagedError, NoCheckpointError

from .manifest import LONGEST, MANIFEST, Manifest, Summary, read_summary

POINTER = "latest"
_REPLACED = ".replaced-"
_FIRST = "00000.bin"  # rank 0's data
_LONGEST = 200  # bytes of a tag; file names have 255, and hidden names add to it
_POINTER_SIZE = 1 << 12  # bytes of `latest` that are read; a tag and its checksum are fewer
LOCK = ".lock"
_PATIENCE = 10.0  # seconds; child processes of a killed job may hold its lock a little longer than the job
_PAUSE = 0.1


def tags(path: str | Path) -> list[str]:
    """The tags of the checkpoints in a folder, oldest first; an empty list if there is no folder.

    Checkpoints without a readable manifest are left out. ``verify`` checks the data.

    >>> import tempfile, torch
    >>> import functional_ds as fds
    >>> state = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5)).init({"w": torch.ones(2)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = fds.save(state, folder, tag="first"), fds.save(state, folder, tag="second")
    ...     tags(folder)
    ['first', 'second']
    """
    return [summary.tag for summary in summaries(checked_path(path))]


def latest(path: str | Path) -> str | None:
    """The tag of the checkpoint that ``load`` tries first; None if there is none. Not collective.

    >>> import tempfile, torch
    >>> import functional_ds as fds
    >>> state = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5)).init({"w": torch.ones(2)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     before, _ = latest(folder), fds.save(state, folder, tag="first")
    ...     before, latest(folder)
    (None, 'first')
    """
    return next(iter(candidates(checked_path(path))[0]), None)


def check_tag(tag: str) -> str:
    """The tag itself, if it is a plain name for a folder.

    Raises:
        ValueError: it is not a plain name.
        TypeError: it is not a string.
    """
    if not isinstance(tag, str):
        raise TypeError(f"tag={tag!r} must be a string; pass tag={str(tag)!r}")
    plain = bool(tag) and tag.isprintable() and not set(tag) & set('/\\:*?"<>|')
    if not plain or tag.startswith(".") or tag != tag.strip() or tag == POINTER or len(tag.encode()) > _LONGEST:
        raise ValueError(
            f"tag={tag!r} must be a plain name, such as '1000' or 'best': at most {_LONGEST} bytes, no separators or other "
            f"special characters, no dot in front, and not {POINTER!r}"
        )
    return tag


def check_free(folder: Path, tag: str) -> None:
    """Checks that nothing except a checkpoint has this tag's name.

    Raises:
        CheckpointError: something else has the name.
    """
    place = folder / tag
    if place.is_dir() and not any(place.iterdir()):
        return
    summary = read_summary(place)
    ours = summary.tag == tag if summary is not None else (place / _FIRST).exists()
    if os.path.lexists(place) and not ours:
        raise CheckpointError(
            f"tag={tag!r}: {place} exists and is not a checkpoint of this tag; choose another tag, or move it away"
        )


def check_pointer(folder: Path) -> None:
    """Checks that this library wrote the file ``latest``, if there is one.

    Raises:
        CheckpointError: another library wrote it.
    """
    try:
        read_pointer(folder)
    except DamagedError as error:
        if not written(folder):
            raise CheckpointError(
                f"{folder / POINTER} was not written by this library, and nothing here was; if the folder is DeepSpeed's, "
                "fds.from_deepspeed reads it; give checkpoints a folder of their own"
            ) from error


def place_of(folder: Path, tag: str) -> Path:
    """A checkpoint's folder; after a crash during a replacement, the hidden one."""
    place, hidden = folder / check_tag(tag), hidden_place(folder, tag)
    return hidden if hidden.is_dir() and not place.exists() else place


def hidden_place(folder: Path, tag: str) -> Path:
    """The name of a checkpoint while another one with its tag replaces it."""
    return folder / f"{_REPLACED}{tag}"


def replaced(name: str) -> str | None:
    """The tag of the checkpoint under a hidden name; None for any other name."""
    return name.removeprefix(_REPLACED) if name.startswith(_REPLACED) else None


def open_manifest(folder: Path, tag: str) -> tuple[Path, Manifest]:
    """A checkpoint's folder and its manifest.

    Raises:
        NoCheckpointError: there is no checkpoint of this tag.
        DamagedError: its manifest is missing or damaged.
        NewerFormatError: a later version wrote it.
    """
    place = place_of(folder, tag)
    if not place.is_dir():
        known = ", ".join(tags(folder)) or "none"
        raise NoCheckpointError(f"{folder} has no checkpoint {tag!r}; there are: {known}")
    try:
        data = read_regular(place / MANIFEST, limit=LONGEST)
    except OSError as error:
        raise DamagedError(f"{place / MANIFEST} cannot be read: {error.strerror}") from error
    manifest = Manifest.decode(data, str(place / MANIFEST))
    if manifest.summary.tag != tag:
        raise DamagedError(f"{place} holds the checkpoint {manifest.summary.tag!r}; it was moved here from elsewhere")
    return place, manifest


def summaries(folder: Path) -> list[Summary]:
    """The summaries of all checkpoints, oldest first."""
    by_tag = [(tag, read_summary(place_of(folder, tag))) for tag in _names(folder)]
    ours = [summary for tag, summary in by_tag if summary is not None and summary.tag == tag]
    return sorted(ours, key=lambda summary: summary.sequence)


def candidates(folder: Path) -> tuple[list[str], list[str]]:
    """The tags in the order in which ``load`` tries them, and warnings for the user."""
    rest, warnings = [summary.tag for summary in reversed(summaries(folder))], []
    names = set(_names(folder))
    try:
        first = read_pointer(folder)
    except DamagedError as error:
        warnings.append(str(error))
        first = None
    if first in names:
        return [first, *(tag for tag in rest if tag != first)], warnings
    if first is not None:
        warnings.append(f"{folder / POINTER} names the checkpoint {first!r}, which is not there")
    warnings += [f"{folder / tag} has no manifest that can be read" for tag in written(folder) if tag not in rest]
    return rest, warnings


def written(folder: Path) -> list[str]:
    """The tags of all folders that a save has filled, even if they were damaged since."""
    return [tag for tag in _names(folder) if any((place_of(folder, tag) / name).exists() for name in (MANIFEST, _FIRST))]


def read_pointer(folder: Path) -> str | None:
    """The tag in the file ``latest``; None if there is no such file.

    Raises:
        DamagedError: it was altered, or cannot be read.
    """
    try:
        data = read_regular(folder / POINTER, limit=_POINTER_SIZE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedError(f"{folder / POINTER} cannot be read: {error.strerror}") from error
    tag = data.decode(errors="replace").partition("\n")[0]
    if data != pointer(tag):
        raise DamagedError(f"{folder / POINTER} is damaged")
    return tag


def pointer(tag: str) -> bytes:
    """The content of ``latest``."""
    return f"{tag}\n{zlib.crc32(tag.encode(errors='replace')):08x}\n".encode(errors="replace")


def _names(folder: Path) -> list[str]:
    """All names that could be checkpoints."""
    try:
        entries = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    shown = {name for name in entries if not name.startswith(".")}
    return sorted(filter(_is_tag, shown | {tag for tag in map(replaced, entries) if tag is not None}))


def _is_tag(name: str) -> bool:
    try:
        check_tag(name)
    except ValueError:
        return False
    return True


_SAVING, _DELETING = ".saving-", ".deleting-"


def staging(folder: Path) -> Path:
    """A new hidden folder, into which a checkpoint is written."""
    place = folder / f"{_SAVING}{uuid.uuid4().hex[:12]}"
    place.mkdir()
    return place


def clean(folder: Path) -> None:
    """Removes remains of failed saves, and restores checkpoints that they were replacing."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith((_SAVING, _DELETING)):
            shutil.rmtree(entry, ignore_errors=True)
        elif (tag := replaced(entry.name)) is not None:
            place = folder / tag
            if place.exists():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.rename(place)


def publish(folder: Path, staged: Path, *, tag: str) -> None:
    """Makes a complete and fsynced folder the checkpoint ``tag``, and the newest.

    After a crash at any point each checkpoint is either complete or absent, and ``latest`` names a complete one. The steps that
    need disk space come first, so a full disk changes nothing.

    Args:
        folder: the checkpoints.
        staged: the hidden folder with the new checkpoint.
        tag: its name.
    """
    place, hidden = folder / tag, hidden_place(folder, tag)
    new_pointer = folder / f".{POINTER}.new"
    write_synced(new_pointer, pointer(tag))
    if place.exists():
        place.rename(hidden)
    staged.rename(place)
    sync_folder(folder)
    new_pointer.replace(folder / POINTER)
    sync_folder(folder)
    if hidden.exists():
        shutil.rmtree(hidden, ignore_errors=True)


@attrs.frozen
class Retention:
    """Which checkpoints to keep.

    Attributes:
        keep_last: this many of the newest that were saved with ``keep_last``; None deletes nothing.
        keep_every: also those whose number of updates is a multiple of this.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __attrs_post_init__(self) -> None:
        for name, number in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(f"{name}={number!r} must be a whole number of at least 1, or None")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(
                f"keep_every={self.keep_every} without keep_last: nothing is deleted then; pass keep_last, the number of "
                "newest checkpoints to keep"
            )


def retain(folder: Path, tag: str, *, retention: Retention) -> None:
    """Deletes old checkpoints.

    Args:
        folder: the checkpoints.
        tag: the one that was just written. It is kept, as is the one that ``latest`` names.
        retention: which others to keep.
    """
    if retention.keep_last is None:
        return
    with contextlib.suppress(DamagedError):
        safe = {tag, read_pointer(folder)}
        expiring = [summary for summary in summaries(folder) if summary.expires]
        for old in expiring[: max(0, len(expiring) - retention.keep_last)]:
            if old.tag not in safe and not (retention.keep_every and old.step % retention.keep_every == 0):
                gone = folder / f"{_DELETING}{uuid.uuid4().hex[:12]}"
                place_of(folder, old.tag).rename(gone)  # first, so that no reader sees a half-deleted checkpoint
                shutil.rmtree(gone, ignore_errors=True)


def make_folder(path: str | Path) -> Path:
    """The folder, which is created if missing.

    Raises:
        CheckpointError: it cannot be created, or contains a folder named ``latest``.
        ValueError: no file system takes this name.
    """
    folder = checked_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"path={str(path)!r} cannot be made: {error.strerror}") from error
    if (folder / POINTER).is_dir():
        raise CheckpointError(f"{folder / POINTER} is a folder, and has to be the file that names the newest checkpoint")
    return folder


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
