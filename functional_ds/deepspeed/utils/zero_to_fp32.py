"""``deepspeed.utils.zero_to_fp32``: whole fp32 params out of checkpoints, DeepSpeed's own or those of an engine here."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base.files import written_atomically
from functional_ds.checkpointing.directory import open_manifest
from functional_ds.checkpointing.load import load
from functional_ds.interchange.deepspeed_files import MASTER, ZeroFiles
from functional_ds.interchange.export import export
from functional_ds.optim.sgd import sgd
from functional_ds.state_dict.errors import NoCheckpointError
from functional_ds.step.train_step import train_step

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

M = TypeVar("M", bound=nn.Module)
_STATE = "state"  # the tag that engines use within a tag's folder


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> "OrderedDict[str, Tensor]":
    """The params by name, whole, in fp32, on the CPU. A process that calls it reads by itself; buffers are not among them.

    Args:
        checkpoint_dir: the folder that was passed to ``save_checkpoint``.
        tag: which checkpoint; None for the one that the file ``latest`` names.
        exclude_frozen_parameters: leave out params that were not trained; of DeepSpeed's own checkpoints alone.
        lazy_mode: has no effect.

    Raises:
        NoCheckpointError: there is no such checkpoint.
        ValueError: ``exclude_frozen_parameters`` of a checkpoint that does not say which these are.
    """
    folder = Path(checkpoint_dir)
    name = tag or _latest(folder)
    if not any((folder / name).glob("*_optim_states.pt")):
        if exclude_frozen_parameters:
            raise ValueError("exclude_frozen_parameters: this checkpoint does not say which params were frozen; take them out")
        return _ours(folder / name)
    files = ZeroFiles.open(folder, name)
    found: OrderedDict[str, Tensor] = OrderedDict()
    for path, param in files.params.items():
        if not (exclude_frozen_parameters and param.frozen):
            whole = torch.empty(param.shape, dtype=torch.float32)
            for at, piece in files.read(param, MASTER, start=0, stop=whole.numel()):
                whole.view(-1)[at : at + piece.numel()] = piece
            found[path] = whole
    found.update((alias, found[path]) for alias, path in files.aliases.items() if path in found)
    return found


def _latest(folder: Path) -> str:
    try:
        return (folder / "latest").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise NoCheckpointError(f"{folder / 'latest'} cannot be read ({error.strerror}): pass the tag") from None


def _ours(place: Path) -> "OrderedDict[str, Tensor]":
    """Of a checkpoint that this library has written."""
    _, manifest = open_manifest(place, _STATE)
    names = {name.partition("/")[2]: each.shape for name, each in manifest.tensors.items() if name.startswith("params/")}
    empty = {name: torch.zeros(shape) for name, shape in names.items()}
    step = train_step(lambda params, batch: batch, sgd(0.0))
    alone = comm.new_group([comm.world().rank])
    state = load(place, like=step.init(empty), tag=_STATE, only="params", group=alone)
    return OrderedDict(step.params(state))


def load_state_dict_from_zero_checkpoint(model: M, checkpoint_dir: str, tag: str | None = None) -> M:
    """The model, on the CPU, with the params of a checkpoint.

    Args:
        model: its params get the values, in their dtypes.
        checkpoint_dir: the folder that was passed to ``save_checkpoint``.
        tag: which checkpoint; None for the one that ``latest`` names.

    Raises:
        NoCheckpointError: there is no such checkpoint.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str | os.PathLike[str],
    max_shard_size: Any = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the params into a folder: ``pytorch_model.bin``, or safetensors files. A write that fails leaves what was there.

    Args:
        checkpoint_dir: the folder that was passed to ``save_checkpoint``.
        output_dir: is created if missing.
        max_shard_size: has no effect: ``pytorch_model.bin`` is one file.
        safe_serialization: write ``model.safetensors``.
        tag: which checkpoint; None for the one that ``latest`` names.
        exclude_frozen_parameters: leave out params that were not trained.

    Raises:
        NoCheckpointError: there is no such checkpoint.
    """
    found = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    target = Path(output_dir)
    target.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        export(dict(found), target, overwrite=True)
    else:
        with written_atomically(target / "pytorch_model.bin") as file:
            torch.save(found, file)
