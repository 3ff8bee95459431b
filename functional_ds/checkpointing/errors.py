"""What all ranks must come through, or none."""

from collections.abc import Callable
from typing import TypeVar, cast

from functional_ds import comm

__all__ = [
    "BusyError",
    "CheckpointError",
    "DamagedError",
    "NewerFormatError",
    "NoCheckpointError",
    "StructureError",
    "agreed",
    "together",
]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; checkpoints from before are as they were."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, shortened, altered or not one of its files."""


class NewerFormatError(CheckpointError):
    """A checkpoint was written by a later version of this library."""


class StructureError(CheckpointError, ValueError):
    """A checkpoint holds other leaves, or leaves of other shapes, than were asked for."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class BusyError(CheckpointError):
    """Another job saves into the same folder."""


T = TypeVar("T")


def together(group: comm.Group, work: Callable[[], T]) -> T:
    """``work()`` on every rank; an error on any of them is raised on all. Collective.

    All raise an error of one class: the first rank's that has one, which the others name; a rank with such an error of its
    own raises that.
    """
    found: list[T] = []
    agreed(group, lambda: found.append(work()))  # what work makes stays here
    return found[0]


def agreed(group: comm.Group, work: Callable[[], T]) -> list[T]:
    """The same with everybody's results, which travel."""
    value: T | None = None
    error: Exception | None = None
    try:
        value = work()
    except Exception as found:
        error = found
    everyone = comm.all_gather_object((cast(T, value), _told(error)), group)
    for rank, (_, told) in enumerate(everyone):
        if told is not None:
            if error is not None and _told(error)[0] is told[0]:  # type: ignore[index]
                raise error
            raise told[0](f"rank {rank}: {told[1]}")
    return [found for found, _ in everyone]


def _told(error: Exception | None) -> tuple[type[CheckpointError], str] | None:
    """An error for other ranks: its own class, if that is one of a checkpoint's."""
    if error is None:
        return None
    if isinstance(error, CheckpointError):
        return type(error), str(error)
    return CheckpointError, f"{type(error).__name__}: {error}"
