"""``verify``: whether every byte is as it was written."""

from pathlib import Path

from . import blocks
from .errors import NoCheckpointError
from .folder import open_manifest, read_pointer, written

__all__ = ["verify"]


def verify(path: str | Path, tag: str | None = None) -> None:
    """Reads every byte of a checkpoint; with ``tag=None``, of all in the folder, and what says which is the newest.

    It asks no other rank. A load checks what it reads, too.

    Raises:
        DamagedError: a file is missing, shortened, altered or not the checkpoint's; the message names it.
        NewerFormatError: a later version of this library wrote it.
        NoCheckpointError: there is none.
    """
    folder = Path(path)
    if tag is None:
        pointed = read_pointer(folder)
        found = written(folder)
        if not found and pointed is None:
            raise NoCheckpointError(f"{folder} has no checkpoint")
        for each in dict.fromkeys([*found, *([] if pointed is None else [pointed])]):
            verify(folder, each)
        return
    place, manifest = open_manifest(folder, tag)
    for file in manifest.files:
        blocks.check_file(place, file)
