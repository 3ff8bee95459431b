"""Opening a file of torch's that somebody else wrote, without running anything that it says."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from functional_ds.checkpointing.errors import CheckpointError, DamagedError, NoCheckpointError

__all__ = ["Remains", "load_pickle"]


class Remains:
    """What was an object of DeepSpeed's: its attributes, and nothing that they could do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


# DeepSpeed's own classes that its ZeRO checkpoints refer to, and what stands for them: an enum is its number.
_KNOWN = (
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Remains, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Remains, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Remains, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def load_pickle(path: Path) -> Any:
    """The file's content, its tensors in a memory map: only what is used of them is read.

    Torch's ``weights_only`` loader makes tensors and plain containers, and refuses every name that it does not know.
    DeepSpeed's few classes become ``Remains``, so DeepSpeed need not be installed. Names that a caller has put into
    ``torch.serialization.safe_globals`` are taken as well.

    Raises:
        NoCheckpointError: there is no such file.
        DamagedError: it is damaged, or another kind of file.
        CheckpointError: it holds an object of another class.
    """
    if not path.is_file():
        raise NoCheckpointError(f"path: there is no file {path}")
    try:
        with torch.serialization.safe_globals(list(_KNOWN)):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        what = ", ".join(_others(path)) or str(error).splitlines()[-1]
        raise CheckpointError(f"path: {path} holds what is not loaded, as opening it could run code: {what}") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError) as error:
        raise DamagedError(f"path: {path} is damaged, or no file of torch.save: {str(error).splitlines()[0]}") from error


def _others(path: Path) -> list[str]:
    """The names in a file that are not taken."""
    try:
        return sorted(set(get_unsafe_globals_in_checkpoint(path)) - {name for _, name in _KNOWN})
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError):
        return []
