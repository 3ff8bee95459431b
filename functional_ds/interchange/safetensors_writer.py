"""Writes safetensors files piece by piece, under temporary names until all are complete."""

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import attrs
import torch
from torch import Tensor

from functional_ds.base.disk.files import lock_folder, reserve, sync_folder, write_at, write_synced

from .format import INDEX, SINGLE, HeaderEntry, SafetensorsFile, index_of

_BLOCK = 16 * 2**20  # bytes of a tensor that are converted or copied to the host at once


@attrs.define(eq=False)
class _Open:
    """A file that is being written.

    Attributes:
        descriptor: of the open file; -1 once it is closed.
        temporary: its name until ``commit``.
        begin: the byte after the header.
    """

    descriptor: int
    temporary: Path
    begin: int


@attrs.define(eq=False)
class SafetensorsWriter:
    """Writes files into a folder. They appear with ``commit``; if the block is left without it, they are removed.

    Space for all files is reserved at the beginning, so a full disk fails before the first tensor is gathered.

    Attributes:
        folder: created if missing.
        files: what they will contain.
        overwrite: whether files of these names, and another model in the folder, are replaced.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """

    folder: Path
    files: tuple[SafetensorsFile, ...]
    overwrite: bool
    _made: bool = False
    _open: list[_Open] = attrs.field(factory=list)
    _entries: dict[str, tuple[int, HeaderEntry]] = attrs.field(factory=dict)

    @property
    def is_model(self) -> bool:
        """Whether the files are the model of their folder, and not one file among others."""
        return len(self.files) > 1 or self.files[0].name == SINGLE

    def check(self) -> None:
        """Raises FileExistsError if a file or a model exists that must not be replaced."""
        if not self.overwrite:
            names = [file.name for file in self.files]
            _refuse_existing(
                [self.folder / name for name in dict.fromkeys([SINGLE, INDEX, *names] if self.is_model else names)]
            )

    def __enter__(self) -> "SafetensorsWriter":
        self._made = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for number, file in enumerate(self.files):
                self._open.append(_created(self.folder, file))
                self._entries.update({entry.spec.name: (number, entry) for entry in file.entries})
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def write(self, name: str, values: Tensor, *, offset: int = 0) -> None:
        """Writes elements of a tensor, cast to the file's dtype.

        Args:
            name: the tensor.
            values: the elements, of any shape.
            offset: the first element's place in the flattened tensor.
        """
        number, entry = self._entries[name]
        position = self._open[number].begin + entry.start + offset * entry.spec.dtype.itemsize
        for block in _blocks(values, entry.spec.dtype):
            write_at(self._open[number].descriptor, block, position=position)
            position += len(block)

    def commit(self) -> None:
        """Publishes the files, the index last: a folder without an index or ``model.safetensors`` is not a model.

        The index of a former model in the folder is removed first, so that an index always belongs to its files. Exports of a
        model lock the folder for this; of two programs, the later replaces the other's model or raises an error.

        Raises:
            FileExistsError: another program has published a model meanwhile, and ``overwrite`` is False; nothing is published.
        """
        for file in self._open:
            os.fsync(file.descriptor)
            os.close(file.descriptor)
            file.descriptor = -1
        if self.is_model:
            with lock_folder(self.folder):
                self._commit_model()
        else:
            self._publish(self._open[0].temporary, self.files[0].name)
        sync_folder(self.folder)
        self._open.clear()

    def _commit_model(self) -> None:
        before = _shards(self.folder)
        several = len(self.files) > 1
        self.check()
        if self.overwrite:
            for name in (INDEX, SINGLE) if several else (INDEX,):
                (self.folder / name).unlink(missing_ok=True)
            sync_folder(self.folder)
        for file, done in zip(self.files, self._open, strict=True):
            self._publish(done.temporary, file.name)
        if several:
            sync_folder(self.folder)
            index = _temporary(self.folder, INDEX)
            write_synced(index, index_of(self.files))
            try:
                self._publish(index, INDEX)
            finally:
                index.unlink(missing_ok=True)
        if self.overwrite:
            for old in before - {file.name for file in self.files}:
                (self.folder / old).unlink(missing_ok=True)

    def _publish(self, temporary: Path, name: str) -> None:
        final = self.folder / name
        if self.overwrite:
            temporary.replace(final)
            return
        try:
            os.link(temporary, final)  # unlike a rename, this never replaces a file
        except FileExistsError:
            raise FileExistsError(f"path: {final} exists now; another export was faster") from None
        except OSError:  # a file system without hard links
            _refuse_existing([final])
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
            with suppress(OSError):  # another program put a file there
                self.folder.rmdir()


def _refuse_existing(paths: Sequence[Path]) -> None:
    there = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if there:
        raise FileExistsError(f"path: {', '.join(there)} exists; pass overwrite=True to replace it")


def _created(folder: Path, file: SafetensorsFile) -> _Open:
    header, temporary = file.header, _temporary(folder, file.name)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        reserve(descriptor, file.nbytes)
        write_at(descriptor, memoryview(header), position=0)
    except BaseException:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
        raise
    return _Open(descriptor, temporary, len(header))


def _temporary(folder: Path, name: str) -> Path:
    """A new hidden name next to a file."""
    return folder / f".{name}.{uuid.uuid4().hex}.tmp"


def _blocks(values: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The values' bytes in the file's dtype; not copied if they need no conversion."""
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
