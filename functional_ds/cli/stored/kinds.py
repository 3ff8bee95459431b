"""Detects a checkpoint's format, and opens its tensors by name."""

import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from functional_ds.base.disk.files import read_regular
from functional_ds.checkpointing.dcp import CheckpointReader
from functional_ds.checkpointing.directory import latest, read_pointer, tags
from functional_ds.cli.words.errors_in_one_line import CommandError, refused
from functional_ds.interchange.deepspeed_files import ZeroFiles, enum_member, load_pickle
from functional_ds.interchange.deepspeed_layout import MASTER
from functional_ds.interchange.load_params import open_files
from functional_ds.state_dict.errors import CheckpointError, DamagedError

_METADATA = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata"
)
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {*_METADATA.split(), "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


_LONGEST = 1 << 30  # bytes of metadata


class _KnownClasses(pickle.Unpickler):
    """Creates only objects of known classes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _KNOWN.get(module, ()) and not dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
        return super().find_class(module, name)


def check_metadata(path: Path) -> None:
    """Raises an error for a pickle that refers to classes other than those of such metadata.

    Raises:
        CommandError: it refers to another one, or is damaged.
    """
    try:
        _KnownClasses(io.BytesIO(read_regular(path, limit=_LONGEST))).load()
    except Exception as error:  # a damaged pickle raises anything
        raise CommandError(f"{path} is not opened as metadata of torch.distributed.checkpoint: {error}") from error


KINDS_OF_FILES = ("functional-ds", "safetensors", "deepspeed", "dcp", "torch")


@attrs.frozen(eq=False)
class NamedTensors:
    """An opened checkpoint.

    Attributes:
        kind: one of ``KINDS_OF_FILES``.
        path: its file or folder.
        tensors: all, by name, without values, on the device "meta".
        params: from a parameter's or buffer's name to the name in ``tensors`` with its most precise values.
        notes: what else is known: tags, the number of updates, ranks.
        left_out: names of values that are not tensors.
        read: the values of names.
    """

    kind: str
    path: Path
    tensors: Mapping[str, Tensor]
    params: Mapping[str, str]
    notes: Mapping[str, Any]
    read: Callable[[Sequence[str]], dict[str, Tensor]] = attrs.field(repr=False)
    left_out: tuple[str, ...] = ()


def open_checkpoint(name: str, *, tag: str | None = None) -> NamedTensors:
    """Opens a checkpoint of any format, without running code from its files.

    Args:
        name: a file or folder.
        tag: which checkpoint of a folder with several; the newest by default.

    Raises:
        CommandError: nothing is there, its format is unknown, it is damaged, or holds objects that could run code.
    """
    path = Path(name)
    if not path.exists():
        raise CommandError(f"there is no file or folder {name}")
    with refused(f"{name} cannot be read", CheckpointError, ValueError, OSError, ImportError, RuntimeError):
        opener = _opener(path)
        if tag is not None and opener not in (_ours, _deepspeed):
            raise CommandError(f"--tag {tag}: {name} is one checkpoint and has no tags; leave the option out")
        return opener(path, tag)


def _opener(path: Path) -> Callable[[Path, str | None], NamedTensors]:
    if path.is_file():
        return _safetensors if path.suffix == ".safetensors" or path.name.endswith(".index.json") else _torch
    if (path / ".metadata").is_file():
        return _dcp
    if any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        return _safetensors
    if (path / "manifest.json").is_file() or tags(path) or _is_ours(path):
        return _ours
    if list(path.glob("*model_states.pt")) or list(path.glob("*/*model_states.pt")):
        return _deepspeed
    raise CommandError(
        f"{path} is a folder without a checkpoint: no manifest.json, no model.safetensors, no .metadata, no *model_states.pt"
    )


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _is_ours(path: Path) -> bool:
    try:
        return read_pointer(path) is not None
    except DamagedError:
        return False


def _ours(path: Path, tag: str | None) -> NamedTensors:
    folder, which = (path.parent, path.name) if (path / "manifest.json").is_file() else (path, tag or latest(path))
    if which is None:
        raise CommandError(f"{path} has no checkpoint that can be read")
    reader = CheckpointReader(folder, which)
    manifest = reader.manifest
    whole = {name: stored for name, stored in manifest.tensors.items() if stored.whole}
    tensors = {name: _meta(stored.shape, stored.dtype) for name, stored in whole.items()}
    params = reader.params() | {name.removeprefix("buffers."): name for name in tensors if name.startswith("buffers.")}
    summary = manifest.summary
    notes = {"tag": which, "tags": tags(folder), "step": summary.step, "ranks": summary.ranks, "extra": manifest.extra}
    rest = tuple(name for name, stored in manifest.tensors.items() if not stored.whole)
    return NamedTensors("functional-ds", path, tensors, params, notes, reader.whole, rest)


def _safetensors(path: Path, tag: str | None) -> NamedTensors:
    files = open_files(path)
    tensors = {name: _meta(stored.shape, stored.dtype) for name, stored in files.tensors.items()}

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        return {n: files.tensors[n].read(0, tensors[n].numel()).view(tensors[n].shape) for n in names}

    return NamedTensors("safetensors", path, tensors, {name: name for name in tensors}, {"aliases": dict(files.aliases)}, read)


def _deepspeed(path: Path, tag: str | None) -> NamedTensors:
    direct = bool(list(path.glob("*model_states.pt")))
    files = ZeroFiles.open(path.parent, path.name) if direct else ZeroFiles.open(path, tag)
    kinds, trained = sorted(files.kinds() - {MASTER}), [name for name, param in files.params.items() if not param.frozen]
    stored = {f"masters/{name}": (name, MASTER) for name in files.params}
    stored |= {f"optimizer.{state_name}/{name}": (name, state_name) for state_name in kinds for name in trained}
    counts = {f"optimizer.steps/{name}": float(files.updates[files.params[name].group]) for name in trained if kinds}
    values = {name: torch.tensor(count) for name, count in counts.items()} | {"step": torch.tensor(files.made())}
    values |= {f"buffers.{name}": value for name, value in files.buffers.items()}
    tensors = {name: _meta(files.params[leaf].shape, torch.float32) for name, (leaf, _) in stored.items()}
    tensors |= {name: _meta(value.shape, value.dtype) for name, value in values.items()}

    def value_of(name: str) -> Tensor:
        if name in values:
            return values[name].clone()
        leaf, state_name = stored[name]
        return files.whole(files.params[leaf], state_name)

    notes = {"tag": files.path.name, "stage": files.stage, "ranks": len(files.flats), "aliases": dict(files.aliases)}
    notes |= {"step": files.made(), "beside": ("loss_scaler", "lr_scheduler", "client_state", "random generators")}
    params = {name: f"masters/{name}" for name in files.params} | {name: f"buffers.{name}" for name in files.buffers}
    return NamedTensors("deepspeed", path, tensors, params, notes, lambda names: {name: value_of(name) for name in names})


def _dcp(path: Path, tag: str | None) -> NamedTensors:
    check_metadata(path / ".metadata")
    reader = FileSystemReader(path)
    metadata: Metadata = reader.read_metadata()
    stored = {name: x for name, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
    tensors = {name: _meta(x.size, x.properties.dtype) for name, x in stored.items()}

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        values: dict[str, Any] = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
        with warnings.catch_warnings():  # a single process is intended
            warnings.simplefilter("ignore", UserWarning)
            try:
                state_dict_loader.load(values, storage_reader=FileSystemReader(path), no_dist=True)
            except CheckpointException as failed:  # not a subclass of Exception
                error = next((raised[0] for raised in failed.failures.values()), failed)
                raise (error if isinstance(error, Exception) else DamagedError(str(failed))) from None
        return values

    rest = tuple(sorted(metadata.state_dict_metadata.keys() - stored.keys()))
    return NamedTensors("dcp", path, tensors, {name: name for name in tensors}, {}, read, rest)


def _torch(path: Path, tag: str | None) -> NamedTensors:
    content = load_pickle(path)
    for key in ("module", "state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise CommandError(f"{path} holds a {type(content).__name__}, and no tensors by name")
    values = {str(name): x for name, x in content.items() if isinstance(x, Tensor)}
    if not values:
        raise CommandError(f"{path} has no tensors by name")
    tensors = {name: _meta(x.shape, x.dtype) for name, x in values.items()}
    rest = tuple(str(name) for name, x in content.items() if not isinstance(x, Tensor))
    whole = {name: name for name in tensors}
    return NamedTensors("torch", path, tensors, whole, {}, lambda names: {name: values[name] for name in names}, rest)
