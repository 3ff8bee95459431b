"""Converts a checkpoint of any format into another: tensor names of this library's states, and files of every format."""

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from functional_ds.base.disk.files import written_atomically
from functional_ds.checkpointing.save import save_named
from functional_ds.cli.words.errors_in_one_line import CommandError, refused
from functional_ds.interchange.export import export

from .kinds import NamedTensors

_OURS = re.compile(
    r"(params|masters|exact|averages|optimizer)(\.[\w.#]+)?/.+|(step|skip|key|idle|buffers|attributes|settings)\b.*"
)
_PER_RANK = re.compile(r".*@\d+")
_KINDS = MappingProxyType(
    {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum", "sum": "sums", "step": "steps"}
)
_MOMENT = re.compile(r"(?:\w+\.)?state\.(.+)\.(\w+)")  # torch's get_state_dict: optim.state.<param>.exp_avg


def state_names(checkpoint: NamedTensors) -> dict[str, str]:
    """From the names of a state's tensors to the checkpoint's names of them; other tensors belong to no state.

    This library's checkpoints, and files with its names, keep them. DeepSpeed's masters are the params. In torch's distributed
    checkpoints ``<prefix>.<param>`` are params and ``<prefix>.state.<param>.exp_avg`` the optimizer's, as
    ``torch.distributed.checkpoint.state_dict`` names them; the params of numbered optimizer tensors are unknown.

    >>> import torch
    >>> from pathlib import Path
    >>> names = ["model.w", "optim.state.w.exp_avg", "optim.state.0.exp_avg"]
    >>> headers = {name: torch.empty(2, device="meta") for name in names}
    >>> state_names(NamedTensors("dcp", Path("x"), headers, {name: name for name in names}, {}, read=lambda names: {}))
    {'params/w': 'model.w', 'optimizer.exp_avg/w': 'optim.state.w.exp_avg'}
    """
    names = list(checkpoint.tensors)
    if checkpoint.kind == "functional-ds" or _has_our_names(names):
        return {name: name for name in names if not _PER_RANK.fullmatch(name)}  # of ranks that are no more
    if checkpoint.kind == "deepspeed":
        return dict(_of_deepspeed(names))
    return (
        _of_torch(names) if checkpoint.kind == "dcp" else {f"params/{name}": place for name, place in checkpoint.params.items()}
    )


def _has_our_names(names: Iterable[str]) -> bool:
    matches = [_OURS.fullmatch(name) for name in names]
    return all(matches) and any(match and match[1] in ("params", "masters") for match in matches)


def _of_deepspeed(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        role, slash, leaf = name.partition("/")
        state_name = role.removeprefix("optimizer.")
        if role == "masters":
            yield f"params/{leaf}", name
        elif not slash:
            yield name, name
        elif state_name in (*_KINDS, "steps"):
            yield f"optimizer.{_KINDS.get(state_name, state_name)}/{leaf}", name


def _of_torch(names: Iterable[str]) -> dict[str, str]:
    moments = {name: match for name in names if (match := _MOMENT.fullmatch(name))}
    rest = [name for name in names if name not in moments]
    leaves = {match[1] for match in moments.values() if match[2] in _KINDS}
    prefixes = ["", *dict.fromkeys(f"{name.partition('.')[0]}." for name in rest)]
    params = max(
        ({name.removeprefix(p): name for name in rest if name.startswith(p)} for p in prefixes),
        key=lambda by_name: len(leaves & by_name.keys()),
    )
    wanted = {f"params/{leaf}": name for leaf, name in params.items()}
    for name, match in moments.items():
        if match[1] in params and match[2] in _KINDS:
            wanted[f"optimizer.{_KINDS[match[2]]}/{match[1]}"] = name
    return wanted


WRITTEN = ("safetensors", "functional-ds", "dcp", "torch")


def written_as(
    target_format: str,
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
        target_format: one of ``WRITTEN``. A checkpoint of this library takes names of states: ``params/<name>`` and others.
        tensors: by name.
        path: of a file or folder.
        shard_bytes: of a safetensors file in a folder.
        overwrite: whether to replace what exists.
        step: the number of updates, for a checkpoint of this library.
        extra: the JSON values of such a checkpoint.

    Raises:
        CommandError: something is there; the path cannot be written.
    """
    if not overwrite and path.exists() and (path.is_file() or any(path.iterdir())):
        raise CommandError(f"DST: {path} already exists; pass --overwrite to replace it")
    values = {name: x.detach() for name, x in tensors.items()}
    with refused(f"DST: {path} cannot be written", OSError, ValueError, TypeError, RuntimeError):
        if target_format == "safetensors":
            export(values, path, shard_bytes=shard_bytes, metadata={"format": "pt"}, overwrite=overwrite)
        elif target_format == "torch":
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_atomically(path) as file:  # the values may be views of this very file
                torch.save({name: x.clone() for name, x in values.items()}, file)
        elif target_format == "dcp":
            with warnings.catch_warnings():  # a single process is intended
                warnings.simplefilter("ignore", UserWarning)
                state: dict[str, Any] = {name: x.clone() for name, x in values.items()}
                state_dict_saver.save(state, storage_writer=FileSystemWriter(path), no_dist=True)
        else:
            save_named(values, path, tag="converted", step=step, extra=extra)
