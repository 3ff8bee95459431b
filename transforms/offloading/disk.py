"""Asynchronous reads and writes of tensors' bytes, with checksums."""

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock

import attrs
from torch import Tensor

from functional_ds.base.direct_io import DirectFile

from .files import Extent, OffloadError, ScratchFolder

__all__ = ["Disk", "DiskTraffic"]


@attrs.define(eq=False)
class DiskTraffic:
    """What was read from and written to the disk so far, and how long updates waited for it.

    Attributes:
        read: bytes.
        written: bytes.
        waited: seconds for which updates waited for the disk.
        computed: seconds for which updates did other work.
    """

    read: int = 0
    written: int = 0
    waited: float = 0.0
    computed: float = 0.0
    _lock: Lock = attrs.field(factory=Lock, repr=False)

    def add(self, *, read: int = 0, written: int = 0) -> None:
        """Adds to the bytes; any thread may call it."""
        with self._lock:
            self.read += read
            self.written += written


@attrs.define(eq=False)
class Disk:
    """A folder's files, and the threads that read and write them.

    Attributes:
        folder: the files.
        pool: reads and writes.
        background: runs work that waits for the pool.
        direct: whether accesses bypass the page cache (O_DIRECT) where the file system can.
        traffic: what was read and written so far.
    """

    folder: ScratchFolder
    pool: ThreadPoolExecutor
    background: ThreadPoolExecutor
    direct: bool
    traffic: DiskTraffic = attrs.field(factory=DiskTraffic)

    @staticmethod
    def over(folder: ScratchFolder, *, threads: int, direct: bool) -> "Disk":
        """Starts the threads.

        Args:
            folder: the files.
            threads: how many read and write.
            direct: whether accesses bypass the page cache.
        """
        pool = ThreadPoolExecutor(threads, thread_name_prefix="offload")
        background = ThreadPoolExecutor(1, thread_name_prefix="offload")
        return Disk(folder, pool, background, direct)

    def read(
        self, extent: Extent, offset: int, *, into: Tensor, nbytes: int, checksum: int, after: "Sequence[Future[int]]" = ()
    ) -> "Future[int]":
        """Starts a read. Its future raises OffloadError, which names the file, if the bytes are not those that were written.

        Args:
            extent: the version to read.
            offset: the first byte in it, a multiple of a page.
            into: ``uint8`` memory in whole pages, all of which is filled.
            nbytes: how many of these bytes the checksum covers.
            checksum: their CRC-32.
            after: earlier reads and writes of this disk that must be over first.
        """
        return self.pool.submit(self._read, extent, offset, _bytes(into), nbytes, checksum, after)

    def write(self, extent: Extent, offset: int, *, data: Tensor, nbytes: int) -> "Future[int]":
        """Starts a write. Its future is the checksum of the first ``nbytes``.

        Args:
            extent: the version to write.
            offset: the first byte in it, a multiple of a page.
            data: ``uint8`` memory in whole pages, all of which is written.
            nbytes: how many of these bytes the checksum covers.
        """
        return self.pool.submit(self._write, extent, offset, _bytes(data), nbytes)

    def _read(
        self, extent: Extent, offset: int, into: memoryview, nbytes: int, checksum: int, after: "Sequence[Future[int]]"
    ) -> int:
        for earlier in after:  # submitted before this one, so a thread has it
            earlier.exception()
        with self._opened(extent, os.O_RDONLY) as file:
            missing = len(into) - file.read(into, position=extent.offset + offset)
            if missing:
                raise OffloadError(f"{extent.file.path}: it ends {missing} bytes before the end of what was read")
        found = zlib.crc32(into[:nbytes])
        if found != checksum:
            raise OffloadError(
                f"{extent.file.path}: the {nbytes} bytes at {extent.offset + offset} are not those that were written "
                f"(checksum {found:08x}, not {checksum:08x})"
            )
        self.traffic.add(read=len(into))
        return found

    def _write(self, extent: Extent, offset: int, data: memoryview, nbytes: int) -> int:
        found = zlib.crc32(data[:nbytes])
        with self._opened(extent, os.O_WRONLY) as file:
            file.write(data, position=extent.offset + offset)
        self.traffic.add(written=len(data))
        return found

    @contextmanager
    def _opened(self, extent: Extent, flags: int) -> Iterator[DirectFile]:
        path = extent.file.path
        try:
            with DirectFile.open(path, flags, direct=self.direct) as file:
                extent.file.check(file)
                yield file
        except OSError as error:
            raise OffloadError(f"{path}: {error.strerror}") from error


def _bytes(memory: Tensor) -> memoryview:
    return memory.numpy().data
