"""A folder of checkpoints: what is in it, and which is the newest.

```
folder/latest             the tag of the newest, and its checksum
folder/1000/              a checkpoint: manifest.json and data files
folder/.saving-…          one that is being written
folder/.replaced-1000     the one that a checkpoint of the same tag takes the place of
folder/.lock              held by the job that saves here
```
"""

import contextlib
import os
import shutil
import uuid
import zlib
from pathlib import Path

from .errors import CheckpointError, DamagedError, NoCheckpointError
from .manifest import MANIFEST, Manifest, Summary, read_summary

__all__ = [
    "LOCK",
    "POINTER",
    "candidates",
    "check_free",
    "check_pointer",
    "check_tag",
    "clean",
    "hidden_place",
    "latest",
    "made",
    "open_manifest",
    "place_of",
    "pointer",
    "publish",
    "read_pointer",
    "replaced",
    "retain",
    "staging",
    "summaries",
    "tags",
    "write_whole",
    "written",
]

POINTER = "latest"
LOCK = ".lock"
_REPLACED = ".replaced-"
_FIRST = "00000.bin"  # rank 0's data
_LONGEST = 200  # bytes of a tag; file names have 255, and hidden names add to it


def tags(path: str | Path) -> list[str]:
    """The tags of the checkpoints in a folder, oldest first; none where there is no folder.

    Those whose manifest cannot be read are left out; what the data are like, ``verify`` says.
    """
    return [summary.tag for summary in summaries(Path(path))]


def latest(path: str | Path) -> str | None:
    """The tag that ``load`` tries first; None where there is no checkpoint. It asks no other rank."""
    return next(iter(candidates(Path(path))[0]), None)


def check_tag(tag: str) -> str:
    """The tag itself, where it is the plain name of a folder.

    Raises:
        ValueError: it is not.
        TypeError: it is no string.
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
    """That a checkpoint of this tag would take the place of nothing, or of a checkpoint.

    Raises:
        CheckpointError: something else has this name.
    """
    place = folder / tag
    if place.is_dir() and not any(place.iterdir()):
        return
    summary = read_summary(place)
    ours = summary.tag == tag if summary is not None else (place / _FIRST).exists()
    if os.path.lexists(place) and not ours:
        raise CheckpointError(
            f"tag={tag!r}: {place} is there and is no checkpoint of this tag; choose another tag, or move it away"
        )


def check_pointer(folder: Path) -> None:
    """That the file ``latest``, if there is one, is of this library's checkpoints, and not of another's.

    Raises:
        CheckpointError: it is not.
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
    """Where a checkpoint lies; a save that died while it replaced one left it under a hidden name."""
    place, hidden = folder / check_tag(tag), hidden_place(folder, tag)
    return hidden if hidden.is_dir() and not place.exists() else place


def hidden_place(folder: Path, tag: str) -> Path:
    """Where a checkpoint waits while another of its tag takes its place."""
    return folder / f"{_REPLACED}{tag}"


def replaced(name: str) -> str | None:
    """The tag of the checkpoint that waits under a hidden name; None for any other name."""
    return name.removeprefix(_REPLACED) if name.startswith(_REPLACED) else None


def open_manifest(folder: Path, tag: str) -> tuple[Path, Manifest]:
    """Where a checkpoint lies and what is in it.

    Raises:
        NoCheckpointError: there is none of this tag.
        DamagedError: its manifest is missing or damaged.
        NewerFormatError: a later version wrote it.
    """
    place = place_of(folder, tag)
    if not place.is_dir():
        known = ", ".join(tags(folder)) or "none"
        raise NoCheckpointError(f"{folder} has no checkpoint {tag!r}; there are: {known}")
    try:
        data = (place / MANIFEST).read_bytes()
    except OSError as error:
        raise DamagedError(f"{place / MANIFEST} cannot be read: {error.strerror}") from error
    found = Manifest.decode(data, str(place / MANIFEST))
    if found.summary.tag != tag:
        raise DamagedError(f"{place} holds the checkpoint {found.summary.tag!r}; it was moved here from elsewhere")
    return place, found


def summaries(folder: Path) -> list[Summary]:
    """What can be said of the checkpoints without opening them, oldest first."""
    found = [(tag, read_summary(place_of(folder, tag))) for tag in _names(folder)]
    ours = [summary for tag, summary in found if summary is not None and summary.tag == tag]
    return sorted(ours, key=lambda summary: summary.sequence)


def candidates(folder: Path) -> tuple[list[str], list[str]]:
    """The tags in the order in which ``load`` tries them, and what it must warn of."""
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
    """The tags of all folders that a save has filled, whatever has become of them since."""
    return [tag for tag in _names(folder) if any((place_of(folder, tag) / name).exists() for name in (MANIFEST, _FIRST))]


def read_pointer(folder: Path) -> str | None:
    """The tag that ``latest`` names; None where there is no such file.

    Raises:
        DamagedError: it is not as it was written, or cannot be read.
    """
    try:
        data = (folder / POINTER).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedError(f"{folder / POINTER} cannot be read: {error.strerror}") from error
    tag = data.decode(errors="replace").partition("\n")[0]
    if data != pointer(tag):
        raise DamagedError(f"{folder / POINTER} is damaged")
    return tag


def pointer(tag: str) -> bytes:
    """What ``latest`` holds."""
    return f"{tag}\n{zlib.crc32(tag.encode(errors='replace')):08x}\n".encode(errors="replace")


def _names(folder: Path) -> list[str]:
    """The tags that there may be."""
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
