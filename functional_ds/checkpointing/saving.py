"""``save``: a state into a folder, by all ranks together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from functional_ds import comm
from functional_ds.state import State

__all__ = ["save"]


def save(
    state: State,
    path: str | Path,
    *,
    tag: str | None = None,
    group: comm.Group | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Writes the state as the checkpoint ``tag`` in the folder ``path`` and returns the tag once it is published.

    Collective over ``group``. A checkpoint of the same tag is replaced, atomically.

    Args:
        state: any state that a step made; it is not changed.
        path: a folder that all ranks see; made where it is not there.
        tag: the checkpoint's name; by default the count of updates.
        group: the ranks that the state is spread over; None for the whole world.
        keep_last: of the checkpoints that were saved with ``keep_last``, only so many of the newest stay.
        keep_every: those whose count of updates is a multiple of this stay, too.
        extra: JSON values to keep beside the state (the data's position, say); rank 0's count.

    Raises:
        ValueError: a tag that is no plain name; numbers that make no sense.
        TypeError: no state; an ``extra`` that JSON cannot hold; a leaf that is neither a tensor nor a number.
        BusyError: another job saves into this folder.
        CheckpointError: it could not be written, on whichever rank; nothing that was there before is lost.
    """
    raise NotImplementedError
