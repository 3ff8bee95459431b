"""Data files: large writes, a CRC-32 of each block, and reads that check it.

zlib's CRC-32 ran at 3.2 GB/s where this was measured, that of the package zlib-ng, used if it is installed, at 14; SHA-256 at
1.6, BLAKE2b at 0.8. Disks are slower than CRC-32.
"""

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import attrs
import numpy as np

from functional_ds.base.disk.direct_io import DirectFile, aligned
from functional_ds.state_dict.errors import DamagedError

from .manifest import BLOCK, DataFile

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

_READ_SIZE = 2 << 20  # bytes of one read: large enough to hide the cost of a system call, and checked while it is in the cache
_WRITE_SIZE = 8 << 20  # bytes of one write, in whole pages
_READERS = 4
_PIECES = 64  # requests that one read fills in place


def write(path: Path, pieces: Iterable[memoryview]) -> DataFile:
    """Writes a new file and returns once the disk has it.

    The system writes one part while the next is copied and its checksums are computed. Additional peak memory: 16 MiB.
    """
    checks, size = _BlockChecksums(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with DirectFile.open(path, flags) as file, ThreadPoolExecutor(1) as pool:
        writes: deque[Future[None]] = deque()
        for part in _packed(pieces, (_buffer(_WRITE_SIZE), _buffer(_WRITE_SIZE))):
            writes.append(_submit(pool, partial(file.write, part, position=size)))
            size += len(part)
            checks.update(part)
            if len(writes) == 2:  # the next part overwrites the buffer of the first
                writes.popleft().result()
        for pending in writes:
            pending.result()
        file.sync()
    return DataFile(path.name, size, checks.finish())


def _submit(pool: ThreadPoolExecutor, write: Callable[[], None]) -> "Future[None]":
    """Starts the write; while the interpreter shuts down, when pools start nothing any more, it writes here."""
    with suppress(RuntimeError):
        return pool.submit(write)
    write()
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _buffer(nbytes: int) -> memoryview:
    return aligned(nbytes).numpy().data


def _packed(pieces: Iterable[memoryview], buffers: tuple[memoryview, memoryview]) -> Iterator[memoryview]:
    """The pieces' bytes in parts that fill two buffers in turn; the last part may be shorter."""
    filled, turn = 0, 0
    for piece in pieces:
        source, done = np.frombuffer(piece, np.uint8), 0
        while done < len(source):
            count = min(len(source) - done, _WRITE_SIZE - filled)
            into = np.frombuffer(buffers[turn], np.uint8)[filled : filled + count]
            np.copyto(into, source[done : done + count])  # NumPy lets other threads run meanwhile
            filled, done = filled + count, done + count
            if filled == _WRITE_SIZE:
                yield buffers[turn][:filled]
                filled, turn = 0, 1 - turn
    if filled:
        yield buffers[turn][:filled]


@attrs.define
class _BlockChecksums:
    """The CRC-32 of each block of a stream."""

    done: list[int] = attrs.field(factory=list)
    current: int = 0
    filled: int = 0

    def update(self, data: memoryview) -> None:
        """Takes the stream's next bytes."""
        start = 0
        while start < len(data):
            part = data[start : start + BLOCK - self.filled]
            self.current = crc32(part, self.current)
            self.filled += len(part)
            start += len(part)
            if self.filled == BLOCK:
                self.done.append(self.current)
                self.current, self.filled = 0, 0

    def finish(self) -> tuple[int, ...]:
        """All checksums, that of a last, shorter block included."""
        return (*self.done, self.current) if self.filled else tuple(self.done)


@attrs.frozen(eq=False)
class ReadRequest:
    """Bytes of a file, from ``position`` on, to read into ``into``."""

    position: int
    into: memoryview

    @property
    def stop(self) -> int:
        """Where they end in the file."""
        return self.position + len(self.into)


@attrs.frozen
class _BlockRange:
    """Neighbouring blocks, from byte ``low`` to ``high``, and the requests for bytes in them."""

    low: int
    high: int
    requests: tuple[ReadRequest, ...] = ()


def read(folder: Path, file: DataFile, *, requests: Iterable[ReadRequest]) -> None:
    """Reads and checks the blocks that the requests touch, and no others, straight into the requests' memory.

    Several threads read, each through the page cache, and check what they read. An error leaves the memory half filled.
    Peak memory in addition to the requests' own: 8 MiB.

    Args:
        folder: of the checkpoint.
        file: what the manifest says about the file.
        requests: which bytes go where, in any order.

    Raises:
        DamagedError: the file is missing, cannot be read or has another size, or a block has another checksum.
    """
    ordered = sorted((request for request in requests if len(request.into)), key=lambda request: request.position)
    _read_ranges(folder / file.name, file, _ranges(file, ordered))


def check_file(folder: Path, file: DataFile) -> None:
    """Reads and checks a whole file; raises as ``read`` does."""
    starts = range(0, file.size, _READ_SIZE)
    _read_ranges(folder / file.name, file, [_BlockRange(low, min(low + _READ_SIZE, file.size)) for low in starts])


def _read_ranges(path: Path, file: DataFile, ranges: list[_BlockRange]) -> None:
    readers, buffers = min(_READERS, len(ranges)), SimpleQueue[memoryview]()
    for _ in range(readers):
        buffers.put(memoryview(bytearray(min(_READ_SIZE, file.size))))
    with _opened(path, file) as source, ThreadPoolExecutor(max(1, readers)) as pool:
        for done in [pool.submit(_read_range, source, path, file, blocks, buffers) for blocks in ranges]:
            done.result()


def _opened(path: Path, file: DataFile) -> DirectFile:
    try:
        source = DirectFile.open(path, direct=False)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    if source.size != file.size:
        size = source.size
        source.close()
        raise DamagedError(f"{path} is damaged: it has {size} bytes, and was written with {file.size}")
    return source


def _ranges(file: DataFile, requests: list[ReadRequest]) -> list[_BlockRange]:
    """The blocks that the requests touch, in runs that one read can take. Requests come in the order of their positions."""
    runs: list[tuple[int, int]] = []
    for request in requests:
        low, high = request.position // BLOCK * BLOCK, min(file.size, -(-request.stop // BLOCK) * BLOCK)
        if runs and low <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(high, runs[-1][1]))
        else:
            runs.append((low, high))
    parts = [(start, min(start + _READ_SIZE, high)) for low, high in runs for start in range(low, high, _READ_SIZE)]
    starts = [low for low, _ in parts]
    touching: list[list[ReadRequest]] = [[] for _ in parts]
    for request in requests:
        index = bisect_right(starts, request.position) - 1
        while index < len(parts) and starts[index] < request.stop:
            touching[index].append(request)
            index += 1
    return [_BlockRange(low, high, tuple(touched)) for (low, high), touched in zip(parts, touching, strict=True)]


def _read_range(
    source: DirectFile, path: Path, file: DataFile, blocks: _BlockRange, buffers: "SimpleQueue[memoryview]"
) -> None:
    spare = buffers.get()
    try:
        parts = _in_place(blocks, spare)
        read = parts or [spare[: blocks.high - blocks.low]]
        _fill(source, path, file, read, blocks.low)
        _check(path, file, read, blocks.low)
        if not parts:
            for request in blocks.requests:
                first, last = max(blocks.low, request.position), min(blocks.high, request.stop)
                request.into[first - request.position : last - request.position] = spare[first - blocks.low : last - blocks.low]
    finally:
        buffers.put(spare)


def _in_place(blocks: _BlockRange, spare: memoryview) -> list[memoryview]:
    """The blocks' bytes as memory that one call fills: the requests' memory, and ``spare`` between them.

    None if two requests want the same bytes, or if there are many, as the system accepts about 1,000 parts per call.
    """
    if len(blocks.requests) > _PIECES:
        return []
    parts, place = list[memoryview](), blocks.low
    for request in blocks.requests:
        first, last = max(blocks.low, request.position), min(blocks.high, request.stop)
        if first < place:
            return []
        if first > place:
            parts.append(spare[place - blocks.low : first - blocks.low])
        parts.append(request.into[first - request.position : last - request.position])
        place = last
    return [*parts, spare[place - blocks.low : blocks.high - blocks.low]] if place < blocks.high else parts


def _fill(source: DirectFile, path: Path, file: DataFile, parts: Sequence[memoryview], low: int) -> None:
    try:
        count = source.read_into(parts, position=low)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read at byte {low}: {error.strerror}") from error
    if count < sum(map(len, parts)):
        raise DamagedError(f"{path} ends at byte {low + count}, and was written with {file.size}")


def _check(path: Path, file: DataFile, parts: Iterable[memoryview], low: int) -> None:
    """Compares the checksum of each block with the manifest's; the parts are whole blocks, or the file's end."""
    checksums = _BlockChecksums()
    for part in parts:
        checksums.update(part)
    for start, check in zip(range(low, file.size, BLOCK), checksums.finish(), strict=False):
        if check != file.checks[start // BLOCK]:
            raise DamagedError(f"{path} is damaged in the block of {BLOCK} bytes at {start}")
