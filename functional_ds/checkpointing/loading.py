"""``load``: a checkpoint into a state, straight into shards."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from functional_ds import comm
from functional_ds.state import State

__all__ = ["load"]


def load(
    path: str | Path,
    *,
    like: State,
    tag: str | None = None,
    group: comm.Group | None = None,
    only: str | Sequence[str] | None = None,
    allow_missing: str | Sequence[str] = (),
    allow_extra: str | Sequence[str] = (),
    with_extra: bool = False,
    donate: bool = False,
) -> Any:
    """The state that was saved, as a value of ``like``'s structure: its ranks, stage, units, precision and devices.

    Collective over ``group``. Names are ``params/<leaf>``, ``optimizer.exp_avg/<leaf>``, ``step``, ``slots.ema.leaves/<leaf>``;
    patterns are ``fnmatch``'s, on the whole name or on what is before the slash.

    Args:
        path: the folder.
        like: a state from ``step.init``; it is not changed.
        tag: which checkpoint; None for the newest that is whole: damaged ones are passed over with a warning.
        group: the ranks that ``like`` is spread over; None for the whole world.
        only: load what matches, and keep ``like``'s values for all else: ``only="params"`` loads weights alone.
        allow_missing: what ``like`` has may be missing in the checkpoint if it matches; then ``like``'s value stays.
        allow_extra: what the checkpoint has may be missing in ``like`` if it matches.
        with_extra: return ``(state, extra)``.
        donate: write into ``like``'s memory, and take it, as a step does.
    """
    raise NotImplementedError
