"""``Straight``: a file that is written and read past the page cache, where the file system can."""

import errno
import fcntl
import mmap
import os
from pathlib import Path

import attrs

__all__ = ["PAGE", "Straight", "room"]

PAGE = mmap.PAGESIZE
_DIRECT = getattr(os, "O_DIRECT", 0)


def room(nbytes: int) -> memoryview:
    """Memory in whole pages, as direct reads and writes want it."""
    return memoryview(mmap.mmap(-1, nbytes))


@attrs.define(eq=False)
class Straight:
    """A file that grows by what it is given, or is read.

    A checkpoint is not used again soon, and what goes through the page cache is copied into pages that must be found first:
    slower than many a disk, and memory taken from others. Whole pages from page-aligned memory go straight to the disk; what
    cannot, such as the last bytes of the file, and all after it, go through the cache.
    """

    handle: int
    direct: bool

    @staticmethod
    def create(path: Path) -> "Straight":
        """A new file; a file system without direct access gives one without."""
        return Straight._of(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    @staticmethod
    def open(path: Path) -> "Straight":
        """A file to read."""
        return Straight._of(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    @staticmethod
    def _of(handle: int) -> "Straight":
        if _DIRECT:
            try:
                fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | _DIRECT)
            except OSError:  # tmpfs before Linux 6.6, some network file systems
                return Straight(handle, direct=False)
        return Straight(handle, direct=bool(_DIRECT))

    def write(self, data: memoryview) -> int:
        """All of it; how many bytes that was."""
        done = 0
        while done < len(data):
            pages = (len(data) - done) // PAGE * PAGE
            if self.direct and not pages:
                self._through_the_cache()
            direct = self.direct
            try:
                done += os.write(self.handle, data[done : done + pages] if direct else data[done:])
            except OSError as error:
                self._refused(error, direct)
        return done

    def read(self, into: memoryview, position: int) -> int:
        """Some bytes from there on, at most as many as there is room for; how many: none at the end of the file."""
        while True:
            direct = self.direct
            try:
                return os.preadv(self.handle, [into], position)
            except OSError as error:
                self._refused(error, direct)

    def close(self) -> None:
        """Gives the handle back."""
        os.close(self.handle)

    def _refused(self, error: OSError, direct: bool) -> None:
        """What went past the cache may go through it."""
        if not direct or error.errno != errno.EINVAL:
            raise error
        self._through_the_cache()

    def _through_the_cache(self) -> None:
        fcntl.fcntl(self.handle, fcntl.F_SETFL, fcntl.fcntl(self.handle, fcntl.F_GETFL) & ~_DIRECT)
        self.direct = False
