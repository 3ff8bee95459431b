"""A run's scratch folder: locked while its process lives, gone when nothing needs it any more."""

import fcntl
import json
import os
import shutil
import socket
import uuid
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import attrs

from functional_ds.step.state import UpdateError

__all__ = ["PAGE", "Extent", "File", "Folder", "OffloadError", "check_folder", "padded"]

PAGE = 4096  # what direct reads and writes come in
_PREFIX = "fds-offload-"
_MANIFEST = "manifest.json"


class OffloadError(UpdateError):
    """A file of an offloaded state cannot be read or written. An update that raises it has changed nothing."""


def padded(nbytes: int) -> int:
    """In whole pages."""
    return -(-nbytes // PAGE) * PAGE


@attrs.define(eq=False)
class File:
    """Versions of one tensor, one behind the other; those that no ``Extent`` refers to are free for the next."""

    path: Path
    nbytes: int  # of one version, in whole pages
    _versions: int = 0
    _free: list[int] = attrs.field(factory=list)
    _lock: Lock = attrs.field(factory=Lock)

    def check(self, fd: int) -> None:
        """Refuses a file whose length is not what it should be.

        Raises:
            OffloadError: something else changed it.
        """
        with self._lock:  # else it may be growing
            found, expected = os.fstat(fd).st_size, self._versions * self.nbytes
        if found != expected:
            raise OffloadError(f"{self.path}: it is {found} bytes long, but was {expected}: something else changed it")

    def reserve(self, versions: int) -> None:
        """Makes room on the disk for so many more versions.

        Raises:
            OffloadError: there is none; the file stays as it was.
        """
        with self._lock:
            self._grow(versions)

    def take(self) -> "Extent":
        """Room for a version that nobody refers to yet; the file grows where there is none left."""
        with self._lock:
            if not self._free:
                self._grow(1)
            return Extent(self, self._free.pop())

    def give(self, index: int) -> None:
        """Takes back a version's room."""
        self._free.append(index)

    def _grow(self, versions: int) -> None:
        before, more = self._versions * self.nbytes, versions * self.nbytes
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, before, more)
            finally:
                os.close(fd)
        except OSError as error:
            raise OffloadError(f"{self.path}: no room for {more} more bytes at {before}: {error.strerror}") from error
        self._free.extend(range(self._versions + versions - 1, self._versions - 1, -1))
        self._versions += versions


@attrs.frozen(eq=False)
class Extent:
    """Where one version of a tensor lies; given back when nobody refers to it."""

    file: File
    index: int

    @property
    def offset(self) -> int:
        """In the file, in bytes."""
        return self.index * self.file.nbytes

    def __del__(self) -> None:
        self.file.give(self.index)


@attrs.define(eq=False)
class Folder:
    """The files of one state's line on one rank; they go when the last value in them does, or with the process.

    Attributes:
        path: a folder of its own, within the one that the user named.
        files: by name.
    """

    path: Path
    files: dict[str, File]

    @staticmethod
    def create(root: Path, sizes: Mapping[str, int], *, versions: int = 2) -> "Folder":
        """A new folder with room for ``versions`` versions of files of these sizes in bytes.

        Folders that dead processes of this host left behind are removed first, with a warning.

        Raises:
            OffloadError: the disk is too small, or a file cannot be made.
        """
        with _locked(root):  # so that several ranks share a disk's free space, and none takes a new folder for a dead one
            _clean(root)
            _check_space(root, versions * sum(map(padded, sizes.values())))
            path = root / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
            try:
                path.mkdir(mode=0o700)
            except OSError as error:
                raise OffloadError(f"{path}: {error.strerror}") from error
            lock = _claim(path)
            folder = Folder(path, {name: File(path / name, padded(size)) for name, size in sizes.items()})
            weakref.finalize(folder, _remove, path, lock, os.getpid())
            for file in folder.files.values():
                file.reserve(versions)
        return folder


def check_folder(path: str | os.PathLike[str]) -> Path:
    """An existing folder that files can be made in, wherever the process goes later.

    Raises:
        ValueError: it is none.
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


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _claim(path: Path) -> int:
    """Writes the manifest and locks it for as long as this process lives."""
    fd = os.open(path / _MANIFEST, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(
        fd, json.dumps({"run": path.name.removeprefix(_PREFIX), "pid": os.getpid(), "host": socket.gethostname()}).encode()
    )
    return fd


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no say
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _clean(root: Path) -> None:
    dead = [path for path in root.glob(f"{_PREFIX}*") if _is_dead(path)]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    if dead:
        names = ", ".join(path.name for path in dead)
        warnings.warn(f"offload: removed what dead processes left in {root}: {names}", RuntimeWarning, stacklevel=2)


def _is_dead(path: Path) -> bool:
    """Whether a process of this host made it whose lock is free; of other hosts' folders nothing is known."""
    try:
        with (path / _MANIFEST).open("rb") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return bool(json.load(manifest)["host"] == socket.gethostname())
    except (OSError, ValueError, KeyError, TypeError):
        return False
