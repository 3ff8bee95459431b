"""``load_params``: safetensors files as params that each rank reads its own part of."""

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.modules.functional import Apply
from functional_ds.sharding.sources import from_source

from .format import CODES, INDEX, SINGLE
from .naming import Naming, Rename, listed

__all__ = ["Stored", "load_params", "opened"]

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


def load_params(
    path: str | Path,
    *,
    like: Any,
    module: nn.Module | Apply | None = None,
    rename: Callable[[str], str] | None = None,
    allow_missing: str | Sequence[str] = (),
    allow_extra: str | Sequence[str] = (),
    device: str | torch.device = "cpu",
) -> Any:
    """The params of a file, in ``like``'s structure, for ``step.init``: each rank reads what it stores, and nothing more.

    The leaves are deferred (``fds.from_source``): they have shapes, dtypes and marks, and their values are read from the mapped
    file when ``init`` stores them, a leaf at a time. So no rank ever holds the whole model where the step does not, nothing is
    broadcast, and ``like`` may be on the meta device. All ranks must see the files, unchanged until then.

    Law: ``step.params(step.init(load_params(path, like=params))) = step.params(state)`` for ``export(state, path)``, bit for
    bit, whatever either of the steps shards.

    Dtypes are ``like``'s: floating values are cast to it, which rounds where it is narrower. Nothing else is cast.

    Args:
        path: a file; a folder with ``model.safetensors`` or with an index, as ``export`` and ``transformers`` write them; or
            an index.
        like: a tree of tensors, of the names, shapes, dtypes and frozen leaves that are wanted.
        module: whose parameters they are: of a tied one any of its names will do, and buffers are no extra names.
        rename: from a leaf's path to its name in the file.
        allow_missing: patterns (``fnmatch``'s) for leaves that the file need not have: those keep ``like``'s values.
        allow_extra: patterns for names that the file may have without a leaf.
        device: where the values shall lie.

    Raises:
        FileNotFoundError: there is no such file, or one that the index names is not there.
        ValueError: names are missing or extra, shapes differ, or dtypes that are not floating; a file is damaged; an index
            names files outside of its folder.
        TypeError: a leaf of ``like`` is no tensor.

    >>> import tempfile
    >>> import functional_ds as fds
    >>> from functional_ds.interchange import export
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export({"w": torch.tensor([1.0, 2.0])}, folder)
    ...     params = load_params(folder, like={"w": torch.empty(2, device="meta")})
    ...     state = fds.train_step(lambda params, x: params["w"].sum(), fds.sgd(0.1)).init(params)
    >>> state.params["w"].tolist()
    [1.0, 2.0]
    """
    tree.tensors(like, "like")
    named = dict(tree.named(like))
    files = opened(Path(path))
    found = _found(files, named, Naming.of(module), rename)
    lacking = [leaf for leaf in named if leaf not in found]
    _check_names(files, found, lacking, Naming.of(module), _patterns(allow_missing), _patterns(allow_extra), rename)
    _check_kinds(named, found)
    deferred = from_source(like, _Reader(found), device=device)
    leaves = [new if leaf in found else named[leaf] for leaf, new in tree.named(deferred)]
    return tree.unflatten(tree.structure(like), leaves)


@attrs.frozen(eq=False)
class _Reader:
    """A source: leaves of a tree under their paths."""

    found: Mapping[str, Stored]

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """A stretch of a leaf."""
        return self.found[path].read(start, stop)


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _found(files: Opened, named: Mapping[str, Any], naming: Naming, rename: Rename | None) -> dict[str, Stored]:
    """The leaves that the files have, under whichever of their names."""
    found = {}
    for leaf in named:
        name = leaf if rename is None else rename(leaf) or ""
        for each in naming.ties.get(name, (name,)):
            stored = files.tensors.get(each) or files.tensors.get(files.aliases.get(each, ""))
            if stored is not None:
                found[leaf] = stored
                break
    return found


def _check_names(
    files: Opened,
    found: Mapping[str, Stored],
    lacking: Sequence[str],
    naming: Naming,
    may_lack: Sequence[str],
    may_have: Sequence[str],
    rename: Rename | None,
) -> None:
    wanted = [leaf if rename is None else rename(leaf) or leaf for leaf in (*found, *lacking)]
    known = {*wanted, *naming.buffers, *(alias for names in naming.ties.values() for alias in names)}
    used = {stored.name for stored in found.values()}
    missing = [leaf for leaf in lacking if not _matches(leaf, may_lack)]
    extra = [name for name in files.tensors if name not in known | used and not _matches(name, may_have)]
    if missing or extra:
        what = listed("missing", missing, extra or list(files.tensors)) + listed("extra", extra, lacking or wanted)
        raise ValueError(
            f"like: its leaves and the file have not the same names{what}; see rename=, allow_missing=, allow_extra="
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_kinds(named: Mapping[str, Tensor], found: Mapping[str, Stored]) -> None:
    wrong = []
    for leaf, stored in found.items():
        like = named[leaf]
        castable = like.dtype.is_floating_point and stored.dtype.is_floating_point
        if tuple(like.shape) != stored.shape or not (like.dtype == stored.dtype or castable):
            wrong.append(
                f"{leaf!r} is {stored.dtype}{list(stored.shape)} in the file and {like.dtype}{list(like.shape)} in like"
            )
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"like: {'; '.join(wrong[:8])}{more}")
