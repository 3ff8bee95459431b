"""Direct I/O (``O_DIRECT``), which bypasses the page cache, for large files."""

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from .files import open_regular

PAGE = 4096  # bytes; addresses, offsets and sizes of direct I/O must be multiples of it
_DIRECT = getattr(os, "O_DIRECT", 0)


def padded(nbytes: int) -> int:
    """Rounds up to whole pages.

    >>> padded(1), padded(4096)
    (4096, 4096)
    """
    return -(-nbytes // PAGE) * PAGE


def aligned(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Uninitialized page-aligned memory for direct I/O, ``uint8[padded(nbytes)]``."""
    memory = torch.empty(padded(nbytes) + PAGE, dtype=torch.uint8, pin_memory=pinned)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + padded(nbytes)]


@attrs.define(eq=False)
class DirectFile:
    """An open file whose reads and writes bypass the page cache if possible.

    For large files that are not read again soon, the cache only costs a copy and memory. Whole pages from page-aligned memory
    are transferred directly. Other accesses, such as to the last bytes of a file, use the cache, as do all accesses after them,
    and all accesses on file systems without direct I/O.
    """

    descriptor: int
    direct: bool

    @staticmethod
    def open(path: Path, flags: int = os.O_RDONLY, *, direct: bool = True) -> "DirectFile":
        """Opens a file.

        Args:
            path: the file.
            flags: the flags of ``os.open``.
            direct: whether to bypass the page cache if possible.

        Raises:
            OSError: it cannot be opened, or is not a regular file.
        """
        descriptor = open_regular(path, flags)
        if not (direct and _DIRECT):
            return DirectFile(descriptor, direct=False)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | _DIRECT)
        except OSError:  # tmpfs before Linux 6.6, some network file systems
            return DirectFile(descriptor, direct=False)
        return DirectFile(descriptor, direct=True)

    def write(self, data: memoryview, *, position: int) -> None:
        """Writes all of the data at a position of the file."""
        done = 0
        while done < len(data):
            pages = (len(data) - done) // PAGE * PAGE
            if self.direct and not pages:
                self._use_cache()
            part = data[done : done + pages] if self.direct else data[done:]
            done += self._transfer(os.pwritev, part, position + done)

    def read(self, into: memoryview, *, position: int, nbytes: int | None = None) -> int:
        """Reads from a position of the file; returns the number of bytes read.

        Args:
            into: memory, in whole pages for a direct read.
            position: the first byte.
            nbytes: how many bytes are needed; None to fill ``into``. Fewer are read only at the end of the file.
        """
        done, needed = 0, len(into) if nbytes is None else nbytes
        while done < needed:
            count = self._transfer(os.preadv, into[done:], position + done)
            if not count:
                break
            done += count
        return done

    def read_into(self, parts: Sequence[memoryview], *, position: int) -> int:
        """Reads from a position of the file into several parts, one after another; returns the number of bytes read.

        Args:
            parts: at most 1,000; memory and sizes in whole pages for a direct read.
            position: the first byte.
        """
        unread, done = [part for part in parts if len(part)], 0
        while unread:
            count = os.preadv(self.descriptor, unread, position + done)
            if not count:
                break
            done += count
            while unread and count >= len(unread[0]):
                count -= len(unread.pop(0))
            if count:
                unread[0] = unread[0][count:]
        return done

    def sync(self) -> None:
        """Waits until all writes are on the disk."""
        os.fsync(self.descriptor)

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return os.fstat(self.descriptor).st_size

    def close(self) -> None:
        """Closes the file."""
        os.close(self.descriptor)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], data: memoryview, position: int) -> int:
        """One system call, repeated through the cache if direct I/O fails."""
        direct = self.direct
        try:
            return call(self.descriptor, [data], position)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
        self._use_cache()
        return call(self.descriptor, [data], position)

    def _use_cache(self) -> None:
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & ~_DIRECT)
        self.direct = False
