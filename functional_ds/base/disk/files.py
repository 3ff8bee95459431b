"""Crash-safe files, locks between processes, and reads of bounded size and depth."""

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import attrs

_PART = 1 << 24  # bytes of one read of a file whose size is not known


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a small file atomically: after a crash the path has all of the data, or its previous content.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "a"), b"data")
    ...     Path(folder, "a").read_bytes(), len(os.listdir(folder))
    (b'data', 1)
    """
    with written_atomically(path) as file:
        file.write(data)


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file, which replaces the path at the end of the block; after an error the path is unchanged."""
    temporary = path.with_name(f".{path.name}.new")
    with _synced(temporary) as file:
        yield file
    temporary.replace(path)
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a small file and waits until it is on the disk; a write that fails leaves no file.

    An existing file or link of that name is removed first, instead of written to.
    """
    with _synced(path) as file:
        file.write(data)


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    path.unlink(missing_ok=True)
    try:
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file; returns its descriptor. Never blocks, as opening a pipe would.

    Args:
        path: the file.
        flags: the flags of ``os.open``.

    Raises:
        OSError: it cannot be opened, or is a pipe, socket, device or folder.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not a file of bytes, but a pipe or a device", str(path))
    os.set_blocking(descriptor, True)
    return descriptor


def read_regular(path: Path, *, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; the size is checked before reading.

    Raises:
        OSError: it has more bytes, or cannot be opened, as in ``open_regular``.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return read_open(file, path, limit=limit)


def read_open(file: BinaryIO, path: Path, *, limit: int) -> bytes:
    """``read_regular`` for an open file."""
    size = os.fstat(file.fileno()).st_size
    data = (file.read(size) if size else _read_parts(file, limit + 1)) if size <= limit else b""
    if max(size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"it has {max(size, len(data)):,} bytes, and at most {limit:,} are read", str(path))
    return data


def _read_parts(file: BinaryIO, most: int) -> bytes:
    """At most so many bytes, in parts: files of the kernel report a size of 0, and a read reserves what it may return."""
    parts = list[bytes]()
    while (rest := most - sum(map(len, parts))) > 0 and (part := file.read(min(rest, _PART))):
        parts.append(part)
    return b"".join(parts)


def checked_path(path: str | os.PathLike[str], *, name: str = "path") -> Path:
    """Checks that a path can be the name of a file.

    Args:
        path: the path of a file or folder.
        name: the argument's name in the error.

    Raises:
        TypeError: it is not a path.
        ValueError: it has a NUL character, or one that file systems cannot encode.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name}={path!r}: pass the path of a file or folder")
    text = str(path)
    if "\0" in text:
        raise ValueError(f"{name}={text!r} has a NUL character, which no file system takes")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}={text!r} has the character {text[error.start]!r}, which no file system takes") from None
    return Path(path)


def sync_folder(path: Path) -> None:
    """Waits until the folder's entries are on the disk; does nothing on systems that cannot sync folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_at(descriptor: int, data: memoryview, *, position: int) -> None:
    """Writes all of the data at a position of an open file.

    Args:
        descriptor: the file's descriptor.
        data: the bytes.
        position: the first byte in the file.
    """
    done = 0
    while done < len(data):
        done += os.pwritev(descriptor, [data[done:]], position + done)


def reserve(descriptor: int, nbytes: int, *, position: int = 0) -> None:
    """Reserves disk space, so that a full disk raises here and not during later writes.

    Args:
        descriptor: the descriptor of an open file.
        nbytes: the number of bytes.
        position: the first byte in the file.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, position, nbytes)
    else:
        os.truncate(descriptor, position + nbytes)


# -- locks -------------------------------------------------------------------------------------------------------------


def process_note() -> dict[str, Any]:
    """This process's host and pid, as written to lock files."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


_NOTE = 1 << 12  # bytes of a process's note


@attrs.define(eq=False)
class FileLock:
    """An exclusive lock on a file, which names its owner. The kernel releases it when the process ends."""

    path: Path
    descriptor: int

    @staticmethod
    def take(path: Path) -> "FileLock | None":
        """Takes the lock on a file, which is created if missing; None if another process has it.

        Raises:
            OSError: the file cannot be opened for writing, or is a link, whose target the lock would overwrite.
        """
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        if os.fstat(descriptor).st_nlink > 1:
            os.close(descriptor)
            raise OSError(errno.EMLINK, "the file has other names", str(path))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        with contextlib.suppress(OSError):  # the note is informative only; the next write reports a full disk
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(process_note()).encode(), 0)
        return FileLock(path, descriptor)

    @staticmethod
    def owner(path: Path) -> dict[str, Any] | None:
        """The ``process_note`` of the process that has or last had the lock; None if the file has none."""
        try:
            note = json.loads(read_regular(path, limit=_NOTE))
            return {"host": note["host"], "pid": note["pid"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    @property
    def lost(self) -> bool:
        """Whether the path is now another file, which others may lock."""
        try:
            return not os.path.samestat(os.fstat(self.descriptor), os.lstat(self.path))
        except OSError:
            return True

    def release(self) -> None:
        """Releases the lock."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, 0)
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # a forked process may hold a copy of the descriptor
            os.close(self.descriptor)
            self.descriptor = -1


@contextlib.contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a folder inside the block, waiting for it if necessary."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# -- text ------------------------------------------------------------------------------------------------------------------

MAX_TEXT = 64 << 20  # bytes of a config, a job or an index
MAX_DEPTH = 64  # of nested blocks


def read_text(path: Path, *, limit: int = MAX_TEXT) -> str:
    """The content of a UTF-8 text file of at most ``limit`` bytes.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_regular(path, limit=limit).decode("utf-8")


def parse_json(text: str, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parses JSON, nested at most 64 deep, with strings that can be encoded as UTF-8.

    Args:
        text: the JSON.
        pairs: ``object_pairs_hook`` of ``json.loads``.

    Raises:
        json.JSONDecodeError: the text is invalid, or nested deeper, or a string cannot be encoded.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
        ...
    json.decoder.JSONDecodeError: its blocks are nested deeper than 64: line 1 column 1 (char 0)
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except (RecursionError, ValueError) as error:
        if _depth(text) > MAX_DEPTH:
            raise json.JSONDecodeError(_TOO_DEEP, text, 0) from None
        if type(error) is not ValueError:  # ValueError: a number with thousands of digits
            raise
        raise json.JSONDecodeError(str(error), text, 0) from None
    try:
        check_plain(value)
    except ValueError as error:
        raise json.JSONDecodeError(str(error), text, 0) from None
    return value


def _depth(text: str) -> int:
    """The nesting depth of a text, whether it is valid or not. The parser's recursion limit may be changed by any library."""
    depths = accumulate((bracket[0] in "[{") - (bracket[0] in "]}") for bracket in _BLOCK.finditer(text))
    return max(depths, default=0)


_BLOCK = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{}]', re.DOTALL)
_TOO_DEEP = f"its blocks are nested deeper than {MAX_DEPTH}"


def check_plain(data: Any) -> None:
    """Checks that plain data can be traversed recursively and encoded as UTF-8.

    Raises:
        ValueError: it is nested deeper than 64; a string has half of a surrogate pair.

    >>> check_plain({"name": chr(0xD800)})
    Traceback (most recent call last):
        ...
    ValueError: the string '\\ud800' has half of a surrogate pair, which is not a character
    """
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += value.keys()
                inner += value.values()
            elif isinstance(value, list | tuple):
                inner += value
            elif isinstance(value, str) and not value.isascii():
                _check_string(value)
        if not inner:
            return
        level = inner
    raise ValueError(_TOO_DEEP)


def _check_string(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the string {value!r} has half of a surrogate pair, which is not a character") from None
