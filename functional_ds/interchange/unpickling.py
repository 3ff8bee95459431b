"""Opening a file of torch's that somebody else wrote, without running anything that it says."""

import pickle
from pathlib import Path
from typing import Any

import torch

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

    Torch's ``weights_only`` loader makes tensors and plain containers, and refuses every name that it does not know; DeepSpeed's
    few classes become ``Remains``, so DeepSpeed need not be installed. Names that a caller has put into
    ``torch.serialization.safe_globals`` are taken as well.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or no such file, or holds an object of another class.
    """
    if not path.is_file():
        raise FileNotFoundError(f"path: there is no file {path}")
    try:
        with torch.serialization.safe_globals(list(_KNOWN)):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        why = str(error).splitlines()[0] if "Unsupported" not in str(error) else _named(str(error))
        raise ValueError(f"path: {path} holds what is not loaded, as opening it could run code: {why}") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"path: {path} is damaged, or no file of torch.save: {str(error).splitlines()[0]}") from error


def _named(message: str) -> str:
    """The line of torch's message that names the class."""
    return next((line.strip() for line in message.splitlines() if "Unsupported" in line), message.splitlines()[0])
