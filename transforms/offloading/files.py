"""Files of offloaded tensors: a scratch folder, locked while its process runs, and checksummed reads and writes."""

import os
import shutil
import uuid
import warnings
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import attrs
from torch import Tensor

from functional_ds.base.disk.direct_io import DirectFile, padded
from functional_ds.base.disk.files import FileLock, lock_folder, open_regular, process_note, reserve
from functional_ds.comm.record.graph_notes import Outside
from functional_ds.step.state.state import UpdateError

_PREFIX = "fds-offload-"
_LOCK = "manifest.json"


class OffloadError(UpdateError):
    """A file of an offloaded state cannot be read or written. An update that raises it leaves the state as it was."""


@attrs.define(eq=False)
class VersionedFile:
    """A file with several versions of one tensor. A new version takes the space of one that no ``Extent`` uses.

    Attributes:
        path: the file.
        nbytes: the size of one version, in whole pages.
    """

    path: Path
    nbytes: int
    _versions: int = 0
    _free: list[int] = attrs.field(factory=list)
    _lock: Lock = attrs.field(factory=Lock)

    def check(self, file: DirectFile) -> None:
        """Checks the length of the open file.

        Raises:
            OffloadError: another program changed it.
        """
        with self._lock:  # otherwise another thread may be growing it
            length, expected = file.size, self._versions * self.nbytes
        if length != expected:
            raise OffloadError(f"{self.path}: it is {length} bytes long, but was {expected}: something else changed it")

    def reserve(self, versions: int) -> None:
        """Reserves disk space for more versions.

        Raises:
            OffloadError: the disk is full; the file is unchanged.
        """
        with self._lock:
            self._grow(versions)

    def take(self) -> "Extent":
        """Space for a new version; the file grows if it has none left."""
        with self._lock:
            if not self._free:
                self._grow(1)
            return Extent(self, self._free.pop())

    def give(self, index: int) -> None:
        """Frees a version's space."""
        self._free.append(index)

    def _grow(self, versions: int) -> None:
        before, more = self._versions * self.nbytes, versions * self.nbytes
        try:
            fd = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            try:
                reserve(fd, more, position=before)
            finally:
                os.close(fd)
        except OSError as error:
            raise OffloadError(f"{self.path}: no room for {more} more bytes at {before}: {error.strerror}") from error
        self._free.extend(range(self._versions + versions - 1, self._versions - 1, -1))
        self._versions += versions


@attrs.frozen(eq=False)
class Extent:
    """The space of one version of a tensor, freed with the last reference to this object."""

    file: VersionedFile
    index: int

    @property
    def offset(self) -> int:
        """The offset in the file, in bytes."""
        return self.index * self.file.nbytes

    def __del__(self) -> None:
        self.file.give(self.index)


@attrs.define(eq=False)
class ScratchFolder:
    """One rank's files for a state and its successors. They are deleted with the last value in them, or with the process.

    Attributes:
        path: a new folder within the one that the user gave.
        files: by name.
    """

    path: Path
    files: dict[str, VersionedFile]

    @staticmethod
    def create(root: Path, sizes: Mapping[str, int], *, versions: int = 2) -> "ScratchFolder":
        """A new folder with reserved space.

        Folders of ended processes of this host are removed first, with a warning.

        Args:
            root: the folder that the user gave.
            sizes: for each file's name the size of one version in bytes.
            versions: for how many versions of each file to reserve space.

        Raises:
            OffloadError: the disk is too small, or a file cannot be created.
        """
        with lock_folder(root):  # ranks share the disk's free space; a folder not locked yet must not look dead
            _remove_dead(root)
            _check_space(root, versions * sum(map(padded, sizes.values())))
            path = root / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
            try:
                path.mkdir(mode=0o700)
            except OSError as error:
                raise OffloadError(f"{path}: {error.strerror}") from error
            lock = FileLock.take(path / _LOCK)
            folder = ScratchFolder(path, {name: VersionedFile(path / name, padded(size)) for name, size in sizes.items()})
            weakref.finalize(folder, _remove, path, lock, os.getpid())
            for file in folder.files.values():
                file.reserve(versions)
        return folder


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The absolute path of an existing folder that this process can write to.

    Raises:
        ValueError: there is no such folder, or it is not writable.
    """
    root = Path(path)
    if not root.is_dir():
        raise ValueError(f"path={str(root)!r} is not a folder: name one that exists, on a local disk with room for the states")
    if not os.access(root, os.W_OK | os.X_OK):
        raise ValueError(f"path={str(root)!r} is not writable for this process")
    return root.resolve()


def _check_space(root: Path, needed: int) -> None:
    stats = os.statvfs(root)
    free = stats.f_bavail * stats.f_frsize
    if needed > free:
        raise OffloadError(
            f"path={str(root)!r} is too small: this rank needs {needed} bytes there (two versions of what is offloaded), "
            f"{free} are free"
        )


def _remove(path: Path, lock: FileLock | None, pid: int) -> None:
    if os.getpid() == pid:  # a forked child shares the parent's files
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            lock.release()


def _remove_dead(root: Path) -> None:
    dead = [path for path in root.glob(f"{_PREFIX}*") if _is_dead(path)]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    if dead:
        names = ", ".join(path.name for path in dead)
        warnings.warn(f"offload: removed what dead processes left in {root}: {names}", RuntimeWarning, stacklevel=2)


def _is_dead(path: Path) -> bool:
    """Whether a process of this host made the folder and has ended. Locks of other hosts' processes may be invisible here."""
    owner = FileLock.owner(path / _LOCK)
    if owner is None or owner["host"] != process_note()["host"]:
        return False
    try:
        lock = FileLock.take(path / _LOCK)
    except OSError:
        return False
    if lock is not None:
        os.close(lock.descriptor)
    return lock is not None


@attrs.define(eq=False)
class DiskTraffic:
    """Bytes read from and written to the disk so far, and how long updates waited for it.

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
class Disk(Outside):
    """A folder's files, and the threads that read and write them.

    Attributes:
        folder: the files.
        pool: reads and writes.
        background: runs work that waits for the pool.
        direct: whether to bypass the page cache (O_DIRECT), if the file system can.
        traffic: bytes read and written so far.
    """

    folder: ScratchFolder
    pool: ThreadPoolExecutor
    background: ThreadPoolExecutor
    direct: bool
    traffic: DiskTraffic = attrs.field(factory=DiskTraffic)

    def read(
        self, extent: Extent, offset: int, *, into: Tensor, nbytes: int, checksum: int, after: "Sequence[Future[int]]" = ()
    ) -> "Future[int]":
        """Starts a read. Its future raises OffloadError, which names the file, if the bytes differ from those written.

        Args:
            extent: the version to read.
            offset: the first byte in it, a multiple of a page.
            into: ``uint8`` memory in whole pages, all of which is filled.
            nbytes: how many of these bytes the checksum covers.
            checksum: their CRC-32.
            after: earlier reads and writes of this disk to wait for.
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
        actual = zlib.crc32(into[:nbytes])
        if actual != checksum:
            raise OffloadError(
                f"{extent.file.path}: the {nbytes} bytes at {extent.offset + offset} are not those that were written "
                f"(checksum {actual:08x}, not {checksum:08x})"
            )
        self.traffic.add(read=len(into))
        return actual

    def _write(self, extent: Extent, offset: int, data: memoryview, nbytes: int) -> int:
        checksum = zlib.crc32(data[:nbytes])
        with self._opened(extent, os.O_WRONLY) as file:
            file.write(data, position=extent.offset + offset)
        self.traffic.add(written=len(data))
        return checksum

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
