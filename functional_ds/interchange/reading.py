"""Opening safetensors files: one, or a folder of them with an index, checked before anything is read."""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from .format import CODES, INDEX, SINGLE
from .naming import listed

__all__ = ["Stored", "opened"]

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({code: dtype for dtype, code in CODES.items()})


@attrs.frozen
class Stored:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Any = attrs.field(repr=False)  # the library's open file
    name: str = ""

    def read(self, start: int, stop: int) -> Tensor:
        """Elements of the flattened tensor, in the file's memory map: only pages that are used are read."""
        whole: Tensor = self.file.get_tensor(self.name)
        return whole.reshape(-1)[start:stop]


@attrs.frozen(eq=False)
class Opened:
    """Files that are open.

    Attributes:
        tensors: by name.
        aliases: names that stand for another's values, from the files' metadata.
    """

    tensors: Mapping[str, Stored]
    aliases: Mapping[str, str]


def opened(path: Path) -> Opened:
    """A file; or a folder with ``model.safetensors.index.json``, or with ``model.safetensors``.

    Raises:
        FileNotFoundError: there is no such file; the index names one that is not there.
        ValueError: a file is damaged or another kind of file; the index is, or names a file outside of the folder, or
            tensors that the files do not have.
    """
    if path.is_dir():
        if (path / INDEX).exists() and not (path / SINGLE).exists():
            return _indexed(path)
        if not (path / SINGLE).exists():
            raise FileNotFoundError(f"path: {path} has neither {SINGLE} nor {INDEX}")
        path = path / SINGLE
    elif not path.exists():
        raise FileNotFoundError(f"path: there is no file {path}")
    if path.name.endswith(".index.json"):
        return _indexed(path.parent, path.name)
    return _file(path)


def _file(path: Path) -> Opened:
    safe_open, SafetensorError = _library()
    try:
        file = safe_open(path, framework="pt")
        tensors = {}
        for name in file.keys():  # noqa: SIM118  # the library's file is no mapping
            piece = file.get_slice(name)
            code = piece.get_dtype()
            if code not in _DTYPES:
                raise ValueError(f"path: {path} has {name!r} as {code}, which torch tensors cannot be read as here")
            tensors[name] = Stored(tuple(piece.get_shape()), _DTYPES[code], file, name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"path: {path} is damaged, or no safetensors file: {error}") from error
    notes = file.metadata() or {}
    aliases = {alias: name for alias, name in notes.items() if name in tensors and alias not in tensors}
    return Opened(tensors, aliases)


def _library() -> tuple[Any, type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading safetensors files needs their library: pip install 'functional-ds[export]'") from error
    return safe_open, SafetensorError


def _indexed(folder: Path, index: str = INDEX) -> Opened:
    where = _weight_map(folder / index)
    files = {name: _file(folder / name) for name in sorted(set(where.values()))}
    absent = [name for name, file in where.items() if name not in files[file].tensors]
    if absent:
        found = [name for file in files.values() for name in file.tensors]
        raise ValueError(f"path: {folder / index} names tensors that its files do not have{listed('missing', absent, found)}")
    tensors = {name: files[file].tensors[name] for name, file in where.items()}
    aliases = {alias: name for file in files.values() for alias, name in file.aliases.items() if alias not in tensors}
    return Opened(tensors, aliases)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        where = json.loads(index.read_bytes())["weight_map"]
        wrong = not all(isinstance(name, str) and isinstance(file, str) for name, file in where.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"path: {index} is damaged, or no index: {error!r}") from error
    if wrong:
        raise ValueError(f"path: {index} is damaged, or no index: its weight_map does not go from names to files")
    for file in sorted(set(where.values())):
        outside = (
            PurePosixPath(file).is_absolute()
            or PureWindowsPath(file).drive
            or "\\" in file
            or ".." in PurePosixPath(file).parts
        )
        if outside or not file:
            raise ValueError(f"path: {index} names the file {file!r}, which is not in its folder; nothing was opened")
        if not (index.parent / file).is_file():
            raise FileNotFoundError(f"path: {index} names the file {file!r}, which is not there")
    return dict(where)
