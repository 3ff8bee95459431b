"""``deepspeed.utils.zero_to_fp32``: whole fp32 params and buffers from checkpoints, DeepSpeed's or an engine's here."""

import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from functional_ds.checkpointing.dcp import CheckpointReader
from functional_ds.deepspeed.engine.common.engine_files import write_weights
from functional_ds.interchange.deepspeed_files import ZeroFiles
from functional_ds.interchange.deepspeed_layout import MASTER
from functional_ds.state_dict.errors import NoCheckpointError
from functional_ds.state_dict.latest_file import latest_tag

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
    """The params and saved buffers by name, whole, in fp32, on the CPU. Not collective.

    Integer and boolean buffers keep their dtypes.

    Args:
        checkpoint_dir: the folder that was passed to ``save_checkpoint``.
        tag: which checkpoint; None for the one that the file ``latest`` names.
        exclude_frozen_parameters: omit params that were not trained; only for DeepSpeed's own checkpoints.
        lazy_mode: has no effect.

    Raises:
        NoCheckpointError: there is no such checkpoint.
        ValueError: ``exclude_frozen_parameters`` for a checkpoint that does not record which these are.
    """
    folder = Path(checkpoint_dir)
    name = tag or latest_tag(folder)
    if name is None:
        raise NoCheckpointError(f"{folder} has no file 'latest': pass the tag")
    if not any((folder / name).glob("*model_states.pt")):
        if exclude_frozen_parameters:
            raise ValueError("exclude_frozen_parameters: this checkpoint does not say which params were frozen; take them out")
        return _ours(folder / name)
    files = ZeroFiles.open(folder, name)
    state_dict: OrderedDict[str, Tensor] = OrderedDict()
    for path, param in files.params.items():
        if not (exclude_frozen_parameters and param.frozen):
            state_dict[path] = files.whole(param, MASTER)
    state_dict.update((path, _fp32(value)) for path, value in files.buffers.items())
    state_dict.update((alias, state_dict[path]) for alias, path in files.aliases.items() if path in state_dict)
    return state_dict


def _ours(place: Path) -> "OrderedDict[str, Tensor]":
    """Of a checkpoint that this library has written."""
    reader = CheckpointReader(place, _STATE)
    names, extra = reader.params(), reader.manifest.extra or {}
    for name, stored in reader.manifest.tensors.items():
        path = re.sub(r"^buffers\.(stage \d+\.)?", "", name)  # pipelines say whose they are
        if stored.whole and path != name and path in extra.get("buffers", ()):
            names[path] = name
    values = reader.whole(names.values())
    whole = OrderedDict((path, _fp32(values[name])) for path, name in names.items())
    tied: dict[str, str] = extra.get("tied", {})
    whole.update((name, whole[first]) for name, first in tied.items() if first in whole)
    return whole


def _fp32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def load_state_dict_from_zero_checkpoint(model: M, checkpoint_dir: str, tag: str | None = None) -> M:
    """The model, on the CPU, with the params and buffers of a checkpoint.

    Args:
        model: its tensors get the values, in their dtypes.
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
    """Writes params and buffers into a folder: ``pytorch_model.bin``, or safetensors. A failed write leaves what was there.

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
    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    write_weights(state_dict, Path(output_dir, "model.safetensors" if safe_serialization else "pytorch_model.bin"))
