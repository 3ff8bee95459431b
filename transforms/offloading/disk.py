"""Asynchronous reads and writes of tensors' bytes, checked against their checksums."""

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock

import attrs
import torch
from torch import Tensor

from .files import PAGE, Extent, Folder, OffloadError, padded

__all__ = ["Disk", "Traffic", "aligned"]


@attrs.define(eq=False)
class Traffic:
    """What went between memory and disk so far, and who waited for it.

    Attributes:
        read: bytes.
        written: bytes.
        waited: seconds in which updates waited for the disk.
        computed: seconds in which they did something else.
    """

    read: int = 0
    written: int = 0
    waited: float = 0.0
    computed: float = 0.0
    _lock: Lock = attrs.field(factory=Lock, repr=False)

    def add(self, *, read: int = 0, written: int = 0) -> None:
        """Counts bytes, from any thread."""
        with self._lock:
            self.read += read
            self.written += written


def aligned(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Uninitialised bytes in whole pages, as direct reads and writes want them."""
    room = torch.empty(padded(nbytes) + PAGE, dtype=torch.uint8, pin_memory=pinned)
    start = -room.data_ptr() % PAGE
    return room[start : start + padded(nbytes)]


@attrs.define(eq=False)
class Disk:
    """A folder's files and the threads that read and write them.

    Bytes go past the page cache (O_DIRECT) where the file system can; else through it.
    """

    folder: Folder
    pool: ThreadPoolExecutor
    background: ThreadPoolExecutor  # for what waits for the pool itself
    direct: bool
    traffic: Traffic = attrs.field(factory=Traffic)

    @staticmethod
    def over(folder: Folder, *, threads: int, direct: bool) -> "Disk":
        """With so many threads."""
        pool = ThreadPoolExecutor(threads, thread_name_prefix="offload")
        background = ThreadPoolExecutor(1, thread_name_prefix="offload")
        return Disk(folder, pool, background, direct and _goes_direct(folder))

    def read(
        self, extent: Extent, offset: int, *, into: Tensor, nbytes: int, checksum: int, after: "Sequence[Future[int]]" = ()
    ) -> "Future[int]":
        """Starts to fill ``into``, whole pages of memory, once ``after`` is done.

        The future raises OffloadError, which names the file, where its bytes are not those that were written.
        """
        return self.pool.submit(self._read, extent, offset, _bytes(into), nbytes, checksum, after)

    def write(self, extent: Extent, offset: int, *, data: Tensor, nbytes: int) -> "Future[int]":
        """Starts to write whole pages of memory; the future is the checksum of the first ``nbytes``."""
        return self.pool.submit(self._write, extent, offset, _bytes(data), nbytes)

    def _read(
        self, extent: Extent, offset: int, room: memoryview, nbytes: int, checksum: int, after: "Sequence[Future[int]]"
    ) -> int:
        for earlier in after:  # it was submitted before this, so it is under way
            earlier.exception()
        with self._opened(extent, os.O_RDONLY) as fd:
            done = 0
            while done < len(room):
                got = os.preadv(fd, [room[done:]], extent.offset + offset + done)
                if not got:
                    raise OffloadError(f"{extent.file.path}: it ends {len(room) - done} bytes before the end of what was read")
                done += got
        found = zlib.crc32(room[:nbytes])
        if found != checksum:
            raise OffloadError(
                f"{extent.file.path}: the {nbytes} bytes at {extent.offset + offset} are not those that were written "
                f"(checksum {found:08x}, not {checksum:08x})"
            )
        self.traffic.add(read=len(room))
        return found

    def _write(self, extent: Extent, offset: int, data: memoryview, nbytes: int) -> int:
        found = zlib.crc32(data[:nbytes])
        with self._opened(extent, os.O_WRONLY) as fd:
            done = 0
            while done < len(data):
                done += os.pwritev(fd, [data[done:]], extent.offset + offset + done)
        self.traffic.add(written=len(data))
        return found

    @contextmanager
    def _opened(self, extent: Extent, flags: int) -> Iterator[int]:
        path = extent.file.path
        try:
            fd = os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0))
            try:
                extent.file.check(fd)
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            raise OffloadError(f"{path}: {error.strerror}") from error


def _bytes(room: Tensor) -> memoryview:
    return room.numpy().data


def _goes_direct(folder: Folder) -> bool:
    """Whether the file system takes O_DIRECT; tmpfs and some network file systems do not."""
    if not hasattr(os, "O_DIRECT"):
        return False
    probe = folder.path / "probe"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            return os.pwritev(fd, [_bytes(aligned(PAGE).zero_())], 0) == PAGE
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
