"""``load_params``: loads params from safetensors files; each rank reads its own part."""

import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, BinaryIO

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.disk.files import MAX_TEXT, checked_path, open_regular, parse_json, read_open
from functional_ds.base.marks import ModuleRef, mark_module, slices_of
from functional_ds.modules.functional import Apply
from functional_ds.sharding.leaf_slice import whole_shape
from functional_ds.sharding.sources import from_source
from functional_ds.state_dict.matching import patterns_of

from .format import CODES, INDEX, SINGLE
from .naming import Naming, Rename, listed

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({code: dtype for dtype, code in CODES.items()})


@attrs.frozen
class FileTensor:
    """A tensor in a file.

    Attributes:
        shape: its shape.
        dtype: its dtype in the file.
        file: the safetensors library's open file.
        name: its name there.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Any = attrs.field(repr=False)
    name: str = ""

    def read(self, start: int, stop: int) -> Tensor:
        """Elements of the flattened tensor, as a view of the memory-mapped file, which reads only the pages that are used."""
        whole: Tensor = self.file.get_tensor(self.name)
        return whole.reshape(-1)[start:stop]


@attrs.frozen(eq=False)
class SafetensorsFiles:
    """Open files.

    Attributes:
        tensors: by name.
        aliases: from further names to the names of tensors, from the files' metadata.
    """

    tensors: Mapping[str, FileTensor]
    aliases: Mapping[str, str]


def open_files(path: Path) -> SafetensorsFiles:
    """Opens a file, or a folder with ``model.safetensors.index.json``, or ``model.safetensors``.

    Raises:
        FileNotFoundError: a file is missing, perhaps one that the index names.
        ValueError: a file or the index is damaged or of another kind; the index names a file outside of the folder, or tensors
            that the files do not have.
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


def _file(path: Path) -> SafetensorsFiles:
    safe_open, SafetensorError = _library()
    if not path.is_file():  # opening a pipe would wait for a writer
        raise ValueError(f"path: {path} is not a file of bytes, but a pipe or a device")
    try:
        file = safe_open(path, framework="pt")
        tensors = {}
        for name in file.keys():  # noqa: SIM118  # the library's file is not a mapping
            piece = file.get_slice(name)
            code = piece.get_dtype()
            if code not in _DTYPES:
                raise ValueError(f"path: {path} has {name!r} as {code}, which torch tensors cannot be read as here")
            tensors[name] = FileTensor(tuple(piece.get_shape()), _DTYPES[code], file, name)
    except (SafetensorError, OSError, RuntimeError, MemoryError) as error:  # a sparse file is larger than any address space
        raise ValueError(f"path: {path} is damaged, or not a safetensors file: {error}") from error
    notes = file.metadata() or {}
    aliases = {alias: name for alias, name in notes.items() if name in tensors and alias not in tensors}
    return SafetensorsFiles(tensors, aliases)


def _library() -> tuple[Any, type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading safetensors files needs their library: pip install 'functional-ds[export]'") from error
    return safe_open, SafetensorError


def _indexed(folder: Path, index: str = INDEX) -> SafetensorsFiles:
    path = folder / index
    try:
        opened = os.fdopen(open_regular(path), "rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"path: there is no {path} any more; an export may be replacing it") from None
    except OSError as error:
        raise ValueError(f"path: {path} is damaged, or not an index: {error!r}") from error
    with opened:
        where = _weight_map(path, opened)
        try:
            files = {name: _file(folder / name) for name in sorted(set(where.values()))}
        finally:
            if not _is_still(path, opened.fileno()):  # an export removes the index before it replaces a file
                raise ValueError(f"path: {path} was replaced while the files that it names were opened; load it again")
    absent = [name for name, file in where.items() if name not in files[file].tensors]
    if absent:
        names = [name for file in files.values() for name in file.tensors]
        raise ValueError(f"path: {folder / index} names tensors that its files do not have{listed('missing', absent, names)}")
    tensors = {name: files[file].tensors[name] for name, file in where.items()}
    aliases = {alias: name for file in files.values() for alias, name in file.aliases.items() if alias not in tensors}
    return SafetensorsFiles(tensors, aliases)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the path is this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _weight_map(index: Path, opened: BinaryIO) -> dict[str, str]:
    try:
        where = parse_json(read_open(opened, index, limit=MAX_TEXT).decode("utf-8"))["weight_map"]
        wrong = not all(isinstance(name, str) and isinstance(file, str) for name, file in where.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"path: {index} is damaged, or not an index: {error!r}") from error
    if wrong:
        raise ValueError(f"path: {index} is damaged, or not an index: its weight_map does not go from names to files")
    for file in sorted(set(where.values())):
        path = PurePosixPath(file)
        outside = path.is_absolute() or PureWindowsPath(file).drive or "\\" in file or ".." in path.parts
        if outside or not file:
            raise ValueError(
                f"path: {index} names the file {file!r}, which is not in its folder; nothing was opened. Put the file there"
            )
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
    """Loads params from safetensors files, in ``like``'s structure, for ``step.init``; each rank reads only what it stores.

    The leaves are deferred (``fds.from_source``): they have shapes, dtypes and marks, and ``init`` reads their values from the
    memory-mapped file, one leaf at a time. So no rank holds the whole model unless the step does, nothing is broadcast, and
    ``like`` may be on the meta device. All ranks must see the files, which must not change until then.

    Law: ``step.params(step.init(load_params(path, like=params))) = step.params(state)`` for ``export(state, path)``, bitwise,
    for any sharding of both steps.

    Dtypes are ``like``'s. Floating-point values are cast, with rounding if the dtype is narrower; other values are not.

    Args:
        path: a file; a folder with ``model.safetensors`` or with an index, as ``export`` and ``transformers`` write them; or an
            index.
        like: a tree of tensors with the wanted names, shapes and dtypes, and with frozen leaves marked. Files have whole
            leaves, also if ``like`` has slices of them.
        module: whose parameters they are: a tied parameter may have any of its names in the file, and buffers are not extra.
            Leaves are marked as parameters of an ``apply``, so that tensor-parallel plans know their layers.
        rename: from a leaf's path to its name in the file.
        allow_missing: patterns (``fnmatch``'s) of leaves that the file may lack: those keep ``like``'s values.
        allow_extra: patterns of names in the file that need no leaf.
        device: where the values will be.

    Raises:
        FileNotFoundError: a file is missing, perhaps one that the index names.
        ValueError: names are missing or extra; shapes, or dtypes that are not floating-point, differ; a file is damaged; an
            index names files outside of its folder, or was replaced while its files were opened.
        TypeError: a leaf of ``like`` is not a tensor.

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
    tree.check_paths(like, "like")
    named = dict(tree.named(like))
    files = open_files(checked_path(path))
    by_leaf = _found(files, named, Naming.of(module), rename)
    absent = [leaf for leaf in named if leaf not in by_leaf]
    allowed = patterns_of(allow_missing), patterns_of(allow_extra)
    _check_names(files, by_leaf, absent=absent, naming=Naming.of(module), rename=rename, allowed=allowed)
    _check_kinds(named, by_leaf)
    deferred = from_source(like, _FileSource(by_leaf), device=device)
    leaves = [new if leaf in by_leaf else named[leaf] for leaf, new in tree.named(deferred)]
    if isinstance(module, Apply):
        ref, ties = ModuleRef(module), Naming.of(module).ties
        pairs = zip(named, leaves, strict=True)
        leaves = [mark_module(x, ref, name) if name in ties and name in by_leaf else x for name, x in pairs]
    return tree.unflatten(tree.structure(like), leaves)


@attrs.frozen(eq=False)
class _FileSource:
    """A source for ``from_source``: leaves by their paths, as views of memory-mapped files."""

    by_leaf: Mapping[str, FileTensor]

    at_once = True

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened leaf ``path``."""
        return self.by_leaf[path].read(start, stop)


def _found(files: SafetensorsFiles, named: Mapping[str, Any], naming: Naming, rename: Rename | None) -> dict[str, FileTensor]:
    """The leaves that are in the files under any of their names."""
    by_leaf = {}
    for leaf in named:
        name = leaf if rename is None else rename(leaf) or ""
        for alias in naming.ties.get(name, (name,)):
            stored = files.tensors.get(alias) or files.tensors.get(files.aliases.get(alias, ""))
            if stored is not None:
                by_leaf[leaf] = stored
                break
    return by_leaf


def _check_names(
    files: SafetensorsFiles,
    by_leaf: Mapping[str, FileTensor],
    *,
    absent: Sequence[str],
    naming: Naming,
    rename: Rename | None,
    allowed: tuple[Sequence[str], Sequence[str]],
) -> None:
    """Raises ValueError unless the leaves and the files have the same names, except those that are allowed to differ."""
    wanted = [leaf if rename is None else rename(leaf) or leaf for leaf in (*by_leaf, *absent)]
    known = {*wanted, *naming.buffers, *(alias for names in naming.ties.values() for alias in names)}
    used = {stored.name for stored in by_leaf.values()}
    missing = [leaf for leaf in absent if not _matches(leaf, allowed[0])]
    extra = [name for name in files.tensors if name not in known | used and not _matches(name, allowed[1])]
    if missing or extra:
        what = listed("missing", missing, extra or list(files.tensors)) + listed("extra", extra, absent or wanted)
        raise ValueError(
            f"like: its leaves and the file have not the same names{what}; see rename=, allow_missing=, allow_extra="
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_kinds(named: Mapping[str, Tensor], by_leaf: Mapping[str, FileTensor]) -> None:
    wrong = []
    for leaf, stored in by_leaf.items():
        like = named[leaf]
        castable = like.dtype.is_floating_point and stored.dtype.is_floating_point
        shape = whole_shape(like.shape, slices_of(like))
        if shape != stored.shape or not (like.dtype == stored.dtype or castable):
            wrong.append(f"{leaf!r} is {stored.dtype}{list(stored.shape)} in the file and {like.dtype}{list(shape)} in like")
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"like: {'; '.join(wrong[:8])}{more}")
