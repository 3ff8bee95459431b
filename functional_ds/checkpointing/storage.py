"""Data files: bytes in large writes, a CRC-32 of each block, and reads that check it.

CRC-32 as zlib has it ran at 3.7 GB/s where this was written, SHA-256 at 1.6, BLAKE2b at 0.8: a disk is slower.
"""

import errno
import fcntl
import mmap
import os
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import attrs
import numpy as np

from .errors import DamagedError
from .manifest import BLOCK, DataFile

__all__ = ["PAGE", "Straight", "Want", "check_file", "read", "room", "write"]

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


_READ = 16 << 20  # bytes that are read at once; large enough that neither the system nor Python notices each call
_ROOM = 8 << 20  # bytes that are written at once, in whole pages
_READERS = 2


def write(path: Path, pieces: Iterable[memoryview]) -> DataFile:
    """A new file of these bytes, which are on the disk when this returns.

    They are copied and their checksums computed while the system writes those before; peak memory beside the pieces is 16 MiB.
    """
    checks, size = _Checks(), 0
    file = Straight.create(path)
    try:
        with ThreadPoolExecutor(1) as pool:
            writes: deque[Future[int]] = deque()
            for part in _packed(pieces, (room(_ROOM), room(_ROOM))):
                writes.append(pool.submit(file.write, part))
                checks.feed(part)
                if len(writes) == 2:  # the next part comes into the memory of the one before this
                    size += writes.popleft().result()
            size += sum(write.result() for write in writes)
        os.fsync(file.handle)
    finally:
        file.close()
    return DataFile(path.name, size, checks.finish())


def _packed(pieces: Iterable[memoryview], rooms: tuple[memoryview, memoryview]) -> Iterator[memoryview]:
    """The same bytes, in parts that fill two rooms in turn; the last is shorter."""
    filled, turn = 0, 0
    for piece in pieces:
        source, place = np.frombuffer(piece, np.uint8), 0
        while place < len(source):
            count = min(len(source) - place, _ROOM - filled)
            into = np.frombuffer(rooms[turn], np.uint8)[filled : filled + count]
            np.copyto(into, source[place : place + count])  # other threads go on meanwhile
            filled, place = filled + count, place + count
            if filled == _ROOM:
                yield rooms[turn]
                filled, turn = 0, 1 - turn
    if filled:
        yield rooms[turn][:filled]


@attrs.define
class _Checks:
    """Checksums of blocks of a stream."""

    done: list[int] = attrs.field(factory=list)
    now: int = 0
    filled: int = 0

    def feed(self, data: memoryview) -> None:
        """Further bytes."""
        place = 0
        while place < len(data):
            part = data[place : place + BLOCK - self.filled]
            self.now = zlib.crc32(part, self.now)
            self.filled += len(part)
            place += len(part)
            if self.filled == BLOCK:
                self.done.append(self.now)
                self.now, self.filled = 0, 0

    def finish(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.done, self.now) if self.filled else tuple(self.done)


@attrs.frozen(eq=False)
class Want:
    """Bytes of a file, from ``position`` on, that are to be put into ``into``."""

    position: int
    into: memoryview

    @property
    def stop(self) -> int:
        """Where they end in the file."""
        return self.position + len(self.into)


@attrs.frozen
class _Stretch:
    """Some neighbouring blocks, and who wants bytes of them."""

    low: int
    high: int
    wants: tuple[Want, ...]


def read(folder: Path, file: DataFile, wants: Iterable[Want]) -> None:
    """Reads the blocks that hold what is wanted, and no others; checks each, and hands the bytes out.

    Peak memory beside what is wanted is 32 MiB.

    Raises:
        DamagedError: the file is missing or cannot be read, has another size, or a block another checksum.
    """
    stretches = _stretches(file, sorted((w for w in wants if len(w.into)), key=lambda want: want.position))
    _serve_all(folder, file, stretches)


def check_file(folder: Path, file: DataFile) -> None:
    """Reads all of a file and checks it; raises as ``read`` does."""
    _serve_all(folder, file, [_Stretch(low, min(low + _READ, file.size), ()) for low in range(0, file.size, _READ)])


def _serve_all(folder: Path, file: DataFile, stretches: list[_Stretch]) -> None:
    source, rooms = _opened(folder, file), SimpleQueue[memoryview]()
    readers = min(_READERS, len(stretches))
    for _ in range(readers):
        rooms.put(room(-(-_READ // PAGE) * PAGE))
    try:
        with ThreadPoolExecutor(max(1, readers)) as pool:
            for done in [pool.submit(_serve, source, folder, file, stretch, rooms) for stretch in stretches]:
                done.result()
    finally:
        source.close()


def _opened(folder: Path, file: DataFile) -> Straight:
    path = folder / file.name
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise DamagedError(f"{path} is no file")
        source = Straight.open(path)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    size = os.fstat(source.handle).st_size
    if size != file.size:
        source.close()
        raise DamagedError(f"{path} is damaged: it has {size} bytes, and was written with {file.size}")
    return source


def _stretches(file: DataFile, wants: list[Want]) -> list[_Stretch]:
    """Runs of neighbouring blocks, none longer than a read is to be; the wants are in the order of their positions."""
    runs: list[tuple[int, int]] = []
    for want in wants:
        low, high = want.position // BLOCK * BLOCK, min(file.size, -(-want.stop // BLOCK) * BLOCK)
        if runs and low <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(high, runs[-1][1]))
        else:
            runs.append((low, high))
    parts = [(start, min(start + _READ, high)) for low, high in runs for start in range(low, high, _READ)]
    starts = [low for low, _ in parts]
    sharers: list[list[Want]] = [[] for _ in parts]
    for want in wants:
        place = bisect_right(starts, want.position) - 1
        while place < len(parts) and starts[place] < want.stop:
            sharers[place].append(want)
            place += 1
    return [_Stretch(low, high, tuple(own)) for (low, high), own in zip(parts, sharers, strict=True)]


def _serve(source: Straight, folder: Path, file: DataFile, stretch: _Stretch, rooms: "SimpleQueue[memoryview]") -> None:
    low, high, data = stretch.low, stretch.high, rooms.get()
    try:
        _fill(source, folder, file, data, low, high)
        for start in range(low, high, BLOCK):
            check = zlib.crc32(data[start - low : min(start + BLOCK, high) - low])
            if check != file.checks[start // BLOCK]:
                raise DamagedError(f"{folder / file.name} is damaged in the block of {BLOCK} bytes at {start}")
        bytes_there = np.frombuffer(data, np.uint8)
        for want in stretch.wants:
            first, last = max(low, want.position), min(high, want.stop)
            into = np.frombuffer(want.into, np.uint8)[first - want.position : last - want.position]
            np.copyto(into, bytes_there[first - low : last - low])
    finally:
        rooms.put(data)


def _fill(source: Straight, folder: Path, file: DataFile, data: memoryview, low: int, high: int) -> None:
    done, pages = 0, -(-(high - low) // PAGE) * PAGE
    while done < high - low:
        try:
            count = source.read(data[done:pages], low + done)
        except OSError as error:
            raise DamagedError(f"{folder / file.name} cannot be read at byte {low + done}: {error.strerror}") from error
        if not count:
            raise DamagedError(f"{folder / file.name} ends at byte {low + done}, and was written with {file.size}")
        done += count
