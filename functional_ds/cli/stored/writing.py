"""Named tensors into a checkpoint of another kind."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from functional_ds.base.files import written_atomically
from functional_ds.checkpointing.named_tensors import save_named
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.interchange.export import export

__all__ = ["WRITTEN", "written_as"]

WRITTEN = ("safetensors", "functional-ds", "dcp", "torch")


def written_as(
    kind: str,
    tensors: Mapping[str, Tensor],
    path: Path,
    *,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes tensors by name.

    Args:
        kind: one of ``WRITTEN``. A checkpoint of this library takes names of states: ``params/<name>`` and others.
        tensors: by name.
        path: of a file or folder.
        shard_bytes: of a safetensors file in a folder.
        overwrite: whether what is there is replaced.
        step: the number of updates, for a checkpoint of this library.
        extra: the JSON values of such a checkpoint.

    Raises:
        CommandError: something is there; the path cannot be written.
    """
    if not overwrite and path.exists() and (path.is_file() or any(path.iterdir())):
        raise CommandError(f"DST: {path} is there; --overwrite replaces it")
    values = {name: x.detach() for name, x in tensors.items()}
    try:
        if kind == "safetensors":
            export(values, path, shard_bytes=shard_bytes, metadata={"format": "pt"}, overwrite=overwrite)
        elif kind == "torch":
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_atomically(path) as file:  # the values may be views of this very file
                torch.save({name: x.clone() for name, x in values.items()}, file)
        elif kind == "dcp":
            with warnings.catch_warnings():  # that there is one process is what is meant
                warnings.simplefilter("ignore", UserWarning)
                state: dict[str, Any] = {name: x.clone() for name, x in values.items()}
                state_dict_saver.save(state, storage_writer=FileSystemWriter(path), no_dist=True)
        else:
            save_named(values, path, tag="converted", step=step, extra=extra)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise CommandError(f"DST: {path} cannot be written: {error}") from error
