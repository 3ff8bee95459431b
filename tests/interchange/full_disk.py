"""A disk that is full."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

__all__ = ["full_disk"]


def full_disk(value: Any, place: Any) -> None:
    """``torch.save`` on a disk that is full after some bytes."""
    with nullcontext(place) if hasattr(place, "write") else Path(place).open("wb") as file:
        file.write(b"PK")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
