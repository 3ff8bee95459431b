"""The metadata of torch.distributed.checkpoint, which are a pickle: read only if all that it names is known."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from functional_ds.base.files import read_regular
from functional_ds.cli.words.errors_in_one_line import CommandError

__all__ = ["check_metadata"]

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
    """Makes objects of known classes alone."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _KNOWN.get(module, ()) and not dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
        return super().find_class(module, name)


def check_metadata(path: Path) -> None:
    """Refuses a pickle that names anything but the classes of which such metadata are made.

    Raises:
        CommandError: it names something else, or is damaged.
    """
    try:
        _KnownClasses(io.BytesIO(read_regular(path, limit=_LONGEST))).load()
    except Exception as error:  # a damaged pickle raises anything
        raise CommandError(f"{path} is not opened as metadata of torch.distributed.checkpoint: {error}") from error
