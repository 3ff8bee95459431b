"""Writing safetensors files piece by piece: under temporary names first, under their own once all is there."""

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import attrs
import torch
from torch import Tensor

from .format import INDEX, SINGLE, File, Place, index_of

__all__ = ["Writer", "refuse_existing"]

_BLOCK = 16 * 2**20  # bytes of a piece that are converted or brought to the host at once


@attrs.define(eq=False)
class _Open:
    """A file that is being written."""

    descriptor: int
    temporary: Path
    begin: int  # where the data begins


@attrs.define(eq=False)
class Writer:
    """Files in a folder, of which nothing is seen until ``commit``; left without it, nothing stays.

    The whole size is set aside at once, so that a disk that is too small says so before the first tensor is gathered.

    Raises:
        OSError: the disk is full, the folder cannot be written.
    """

    folder: Path
    files: tuple[File, ...]
    overwrite: bool
    _made: bool = False
    _open: list[_Open] = attrs.field(factory=list)
    _places: dict[str, tuple[int, Place]] = attrs.field(factory=dict)

    def __enter__(self) -> "Writer":
        self._made = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for number, file in enumerate(self.files):
                self._open.append(_created(self.folder, file))
                self._places.update({place.spec.name: (number, place) for place in file.places})
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._discard()

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """Elements of a tensor, from its flattened element ``offset`` on, cast to the dtype that the file has it in."""
        number, place = self._places[name]
        at = self._open[number].begin + place.start + offset * place.spec.dtype.itemsize
        for block in _blocks(values, place.spec.dtype):
            _write_all(self._open[number].descriptor, block, at)
            at += len(block)

    def commit(self) -> None:
        """Publishes the files, the index last: without it, or without ``model.safetensors``, a folder is no model.

        A former model in the folder loses those first, so that no moment shows a mixture.
        """
        for file in self._open:
            os.fsync(file.descriptor)
            os.close(file.descriptor)
            file.descriptor = -1
        if len(self.files) == 1 and self.files[0].name not in (SINGLE, INDEX):
            self._publish(self._open[0].temporary, self.files[0].name)
        else:
            self._commit_model()
        _sync(self.folder)
        self._open.clear()

    def _commit_model(self) -> None:
        before = _shards(self.folder)
        several = len(self.files) > 1
        if self.overwrite:
            for entrance in (INDEX, SINGLE) if several else (INDEX,):
                (self.folder / entrance).unlink(missing_ok=True)
            _sync(self.folder)
        for file, done in zip(self.files, self._open, strict=True):
            self._publish(done.temporary, file.name)
        if several:
            _sync(self.folder)
            self._publish(_written(self.folder, index_of(self.files)), INDEX)
        if self.overwrite:
            for old in before - {file.name for file in self.files}:
                (self.folder / old).unlink(missing_ok=True)

    def _publish(self, temporary: Path, name: str) -> None:
        final = self.folder / name
        if self.overwrite:
            temporary.replace(final)
            return
        try:
            os.link(temporary, final)  # unlike a renaming, this never replaces
        except FileExistsError:
            raise FileExistsError(f"path: {final} is there now; another export was faster") from None
        except OSError:  # a file system without links
            refuse_existing([final])
            temporary.replace(final)
        else:
            temporary.unlink()

    def _discard(self) -> None:
        for file in self._open:
            if file.descriptor >= 0:
                os.close(file.descriptor)
            file.temporary.unlink(missing_ok=True)
        self._open.clear()
        if self._made:
            with suppress(OSError):  # it is not empty any more
                self.folder.rmdir()


def refuse_existing(paths: Sequence[Path]) -> None:
    """Raises FileExistsError where one of the files is there."""
    there = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if there:
        raise FileExistsError(f"path: {', '.join(there)} exists; pass overwrite=True to replace it")


def _created(folder: Path, file: File) -> _Open:
    header = file.header
    temporary, descriptor = _fresh(folder, file.name)
    try:
        size = file.nbytes
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
        _write_all(descriptor, memoryview(header), 0)
    except BaseException:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
        raise
    return _Open(descriptor, temporary, len(header))


def _fresh(folder: Path, name: str) -> tuple[Path, int]:
    """A new file beside the one of this name, with the permissions that the user's mask leaves."""
    temporary = folder / f".{name}.{uuid.uuid4().hex}.tmp"
    return temporary, os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _written(folder: Path, data: bytes) -> Path:
    temporary, descriptor = _fresh(folder, INDEX)
    try:
        _write_all(descriptor, memoryview(data), 0)
        os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return temporary


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)


def _blocks(values: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The values' bytes as the file has them; what needs no conversion is not copied."""
    flat = values.detach().reshape(-1)
    if flat.dtype == dtype and flat.device.type == "cpu":
        yield _bytes(flat)
        return
    for block in flat.split(max(1, _BLOCK // max(flat.dtype.itemsize, dtype.itemsize))):
        yield _bytes(block.to("cpu").to(dtype))


def _bytes(flat: Tensor) -> memoryview:
    plain = flat.resolve_conj().resolve_neg().contiguous()
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


def _shards(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("model-?????-of-?????.safetensors")}


def _sync(folder: Path) -> None:
    """Makes renamings last."""
    with suppress(OSError):  # not every system opens folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
