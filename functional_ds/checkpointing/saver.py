"""``Saver``: checkpoints that are written while the training goes on."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from functional_ds import comm
from functional_ds.state import State

__all__ = ["Saver"]


class Saver:
    """Saves into one folder in the background; nobody else can save there while it is open.

    ``save`` takes a snapshot and returns; a thread of each rank writes it. There is at most one snapshot: ``save`` first
    waits for the save before. An error of a writer, on whichever rank, is raised on every rank by the next ``save`` or
    ``wait``. As a context manager it waits when the block ends without an error, and closes in any case.

    ``save`` and ``wait`` are collective over ``group``, and so are the ``with`` block's beginning and its end without an error.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        group: comm.Group | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        raise NotImplementedError

    def save(self, state: State, *, tag: str | None = None, extra: Mapping[str, Any] | None = None) -> str:
        """Starts a save of the state as it is now, and returns its tag; the step may then donate the state."""
        raise NotImplementedError

    def wait(self) -> None:
        """Returns once the last save is published; raises what went wrong with it."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises this rank's writer's error, if it has one by now. Waits for nothing, and calls nobody."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of the folder; a save under way is given up unless it was waited for."""
        raise NotImplementedError

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        raise NotImplementedError
