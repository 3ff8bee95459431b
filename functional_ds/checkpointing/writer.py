"""One save under way: a thread of each rank writes, and rank 0's publishes when all have written.

The threads talk by files alone: each rank that is through leaves a receipt in the hidden folder. So a checkpoint is
published as soon as it is complete, whatever the ranks' own threads do meanwhile, and no collective runs beside theirs.
"""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from . import blocks
from .errors import CheckpointError
from .folder import summaries
from .manifest import MANIFEST, DataFile, Manifest, Stored, Summary
from .publishing import publish, retain, write_whole
from .writing import Image

__all__ = ["Draft", "Writer", "data_name"]

_PAUSE = 0.02  # seconds between looks for receipts
_GRACE = 10.0  # seconds for the others once the program ends, or once they say that they are through


def data_name(rank: int) -> str:
    """A rank's data file."""
    return f"{rank:05d}.bin"


@attrs.frozen
class Draft:
    """A checkpoint that is to be.

    Attributes:
        folder: where it is to come.
        staged: the hidden folder that it is written into.
        tag: its name.
        step: the count of updates.
        ranks: how many write.
        tensors: makes where each tensor's stretches will lie; called on rank 0, where nothing waits for it.
        extra: the user's.
        keep_last: see ``save``.
        keep_every: see ``save``.
    """

    folder: Path
    staged: Path
    tag: str
    step: int
    ranks: int
    tensors: Callable[[], Mapping[str, Stored]] = attrs.field(repr=False)
    extra: Any
    keep_last: int | None
    keep_every: int | None


class Writer:
    """Writes this rank's image; on rank 0 it then publishes."""

    def __init__(self, draft: Draft, rank: int, image: Image) -> None:
        self.draft, self.rank = draft, rank
        self.error: BaseException | None = None
        self._image: Image | None = image
        self._written, self._given_up, self._all_written = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {draft.tag}, rank {rank}")
        self._thread.start()

    def join_write(self) -> None:
        """Returns once this rank's file is on the disk; raises what went wrong with it."""
        self._written.wait()
        self.check()

    def join(self) -> None:
        """Returns once the thread is over, on rank 0 hence once the checkpoint is published; all ranks have written."""
        self._all_written.set()
        self._thread.join()
        self.check()

    def give_up(self) -> None:
        """Ends the thread, whatever is missing; the checkpoint is not published, unless it is already."""
        self._given_up.set()
        self._thread.join()
        if self.rank == 0:
            shutil.rmtree(self.draft.staged, ignore_errors=True)

    def check(self) -> None:
        """Raises the thread's error, if it has one."""
        if self.error is not None:
            what = f"the checkpoint {self.draft.tag!r} could not be written into {self.draft.folder}"
            raise CheckpointError(f"{what}: {_told(self.error)}") from self.error

    def _run(self) -> None:
        try:
            file = self._write()
            self._image = None
            self._written.set()
            if self.rank == 0:
                self._publish(file)
        except BaseException as error:  # whatever it is, the rank's own thread must hear of it
            self.error = error
        finally:
            self._image = None
            self._written.set()

    def _write(self) -> DataFile:
        staged, path = self.draft.staged, self.draft.staged / data_name(self.rank)
        image = self._image
        if image is None:
            raise RuntimeError("this image was written already")
        try:
            file = blocks.write(path, _until(image.pieces(), self._given_up))
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()  # on a full disk others may need the room
            raise
        if self.rank:
            note = {"size": file.size, "checks": "".join(f"{check:08x}" for check in file.checks)}
            write_whole(staged / f"{file.name}.receipt", json.dumps(note).encode())
        return file

    def _publish(self, own: DataFile) -> None:
        draft = self.draft
        files = [own, *(self._receipt(rank) for rank in range(1, draft.ranks))]
        sequence = 1 + max((summary.sequence for summary in summaries(draft.folder)), default=0)
        summary = Summary(draft.tag, sequence, draft.step, draft.keep_last is not None, draft.ranks)
        manifest = Manifest(summary, tuple(files), draft.tensors(), draft.extra)
        write_whole(draft.staged / MANIFEST, manifest.encode())
        if self._given_up.is_set():
            raise CheckpointError("it was given up")
        publish(draft.folder, draft.staged, draft.tag)
        retain(draft.folder, draft.tag, draft.keep_last, draft.keep_every)

    def _receipt(self, rank: int) -> DataFile:
        name = data_name(rank)
        path = self.draft.staged / f"{name}.receipt"
        self._wait_for(path, rank)
        note = json.loads(path.read_bytes())
        path.unlink()
        checks = note["checks"]
        return DataFile(name, note["size"], tuple(int(checks[i : i + 8], 16) for i in range(0, len(checks), 8)))

    def _wait_for(self, path: Path, rank: int) -> None:
        until: float | None = None
        while not path.exists():
            if until is None and (self._all_written.is_set() or not threading.main_thread().is_alive()):
                until = time.monotonic() + _GRACE
            if until is not None and time.monotonic() > until:
                raise CheckpointError(f"rank 0 sees no receipt of rank {rank} at {path}; do all ranks see one file system?")
            if self._given_up.wait(_PAUSE):
                raise CheckpointError("it was given up")


def _until(pieces: Iterator[memoryview], given_up: threading.Event) -> Iterator[memoryview]:
    for piece in pieces:
        if given_up.is_set():
            raise CheckpointError("it was given up")
        yield piece


def _told(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__
