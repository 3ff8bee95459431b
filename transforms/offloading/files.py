"""A scratch folder for offloaded tensors: locked while its process lives, deleted when no value in it is needed."""

import os
import shutil
import uuid
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from threading import Lock

import attrs

from functional_ds.base.direct_io import DirectFile, padded
from functional_ds.base.files import FileLock, lock_folder, open_regular, process_note, reserve
from functional_ds.step.state.state import UpdateError

__all__ = ["Extent", "OffloadError", "ScratchFolder", "VersionedFile", "check_folder"]

_PREFIX = "fds-offload-"
_LOCK = "manifest.json"


class OffloadError(UpdateError):
    """A file of an offloaded state cannot be read or written. An update that raises it leaves the state as it was."""


@attrs.define(eq=False)
class VersionedFile:
    """Versions of one tensor in one file, one after the other. The next version takes the space of one that no ``Extent`` uses.

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
            found, expected = file.size, self._versions * self.nbytes
        if found != expected:
            raise OffloadError(f"{self.path}: it is {found} bytes long, but was {expected}: something else changed it")

    def reserve(self, versions: int) -> None:
        """Reserves disk space for more versions.

        Raises:
            OffloadError: the disk is full; the file stays as it was.
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
    """The space of one version of a tensor, which is freed with the last reference to this object."""

    file: VersionedFile
    index: int

    @property
    def offset(self) -> int:
        """Where it begins in the file, in bytes."""
        return self.index * self.file.nbytes

    def __del__(self) -> None:
        self.file.give(self.index)


@attrs.define(eq=False)
class ScratchFolder:
    """One rank's files for a state and its successors. They are deleted with the last value in them, or with the process.

    Attributes:
        path: a new folder within the one that the user named.
        files: by name.
    """

    path: Path
    files: dict[str, VersionedFile]

    @staticmethod
    def create(root: Path, sizes: Mapping[str, int], *, versions: int = 2) -> "ScratchFolder":
        """A new folder with reserved space.

        Folders that dead processes of this host left are removed first, with a warning.

        Args:
            root: the folder that the user named.
            sizes: for each file's name the size of one version in bytes.
            versions: how many versions of each file space is reserved for.

        Raises:
            OffloadError: the disk is too small, or a file cannot be made.
        """
        with lock_folder(root):  # ranks share the disk's free space, and must not take a folder without a lock for a dead one
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
        raise ValueError(f"path={str(root)!r} is no folder: name one that exists, on a local disk with room for the states")
    if not os.access(root, os.W_OK | os.X_OK):
        raise ValueError(f"path={str(root)!r} is not writable for this process")
    return root.resolve()


def _check_space(root: Path, needed: int) -> None:
    found = os.statvfs(root)
    free = found.f_bavail * found.f_frsize
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
    """Whether a process of this host made the folder and has ended. Locks of other hosts' processes may not be visible here."""
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
