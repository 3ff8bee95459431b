"""DeepSpeed's logger and its functions to log on some ranks; building modules on a device."""

import functools
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

import torch

from functional_ds import comm

__all__ = ["OnDevice", "log_dist", "log_dist_once", "logger", "set_log_level_from_string"]

_LEVELS = ("debug", "info", "warning", "error", "critical")


class _Stdout(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stdout`` is at that time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def _made() -> logging.Logger:
    logger = logging.getLogger("DeepSpeed")
    if not logger.handlers:
        handler = _Stdout()
        handler.setFormatter(
            logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
        )
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        set_log_level_from_string(os.environ.get("DEEPSPEED_LOG_LEVEL") or "warning", logger)
    logger.warning_once = functools.cache(logger.warning)  # type: ignore[attr-defined]
    return logger


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the logger's level by its name: DEEPSPEED_LOG_LEVEL's, or a config's ``log_level``.

    Raises:
        ValueError: the name is not a level.
    """
    word = log_level_str.strip().lower()
    if word not in _LEVELS:
        raise ValueError(f"log level {log_level_str!r}: one of {', '.join(_LEVELS)}")
    (custom_logger or logger).setLevel(word.upper())


logger = _made()


def _message(message: object, ranks: Sequence[int] | None) -> str | None:
    """The message with this rank's number, if this rank logs it; -1 stands for all ranks."""
    if not comm.is_initialized():
        return f"[Rank -1] {message}"
    rank = comm.get_rank()
    return f"[Rank {rank}] {message}" if ranks and (ranks[0] == -1 or rank in ranks) else None


def log_dist(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks: [-1] for all. In no world every process logs; in a world without ``ranks`` none.

    Args:
        message: the text.
        ranks: of the world.
        level: the logger's own is WARNING at first.
    """
    text = _message(message, ranks)
    if text is not None:
        logger.log(level, text, stacklevel=2)


@functools.cache
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """``log_dist``, once a process for each message."""
    _once(str(message), None if ranks is None else tuple(ranks), level)


@contextmanager
def OnDevice(dtype: torch.dtype | None = None, device: Any = "meta", enabled: bool = True) -> Iterator[None]:
    """A context in which modules are built on the device, in the dtype.

    Args:
        dtype: the default dtype within the block; None leaves it.
        device: "meta" takes no memory.
        enabled: False does nothing.

    >>> with OnDevice(dtype=torch.bfloat16, device="meta"):
    ...     print(torch.nn.Linear(2, 3).weight.dtype)
    torch.bfloat16
    """
    before = torch.get_default_dtype()
    with torch.device(device) if enabled else nullcontext():
        if enabled and dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
