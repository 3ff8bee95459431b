"""A folder of checkpoints: what is in it, and which is the newest.

```
folder/latest             the tag of the newest, and its checksum
folder/1000/              a checkpoint: manifest.json and data files
folder/.saving-…          one that is being written
folder/.replaced-1000     the one that a checkpoint of the same tag takes the place of
folder/.lock              held by the job that saves here
```
"""

import os
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
    "hidden_place",
    "latest",
    "open_manifest",
    "place_of",
    "pointer",
    "read_pointer",
    "replaced",
    "summaries",
    "tags",
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
