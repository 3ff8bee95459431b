"""``save``: a state into a folder, by all ranks together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from functional_ds import comm
from functional_ds.state import State

from .saver import Saver

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
    """Writes the state as the checkpoint ``tag`` in the folder ``path``, and returns the tag once it is published.

    Law 37: ``load_M ∘ save_N = id``, bitwise, for any numbers of ranks N and M, stages, units and meshes.

    Collective over ``group``. Every element is written once, by one of the ranks that have it, straight from the state's
    memory: beside it a rank needs a few MB. A checkpoint of the same tag is replaced. Whatever happens meanwhile, the
    checkpoints from before can be loaded.

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
        BusyError: another job, or an open Saver, saves into this folder.
        CheckpointError: it could not be written, on whichever rank; the folder has something of the tag's name that is no
            checkpoint, or is another library's.

    Cost: each rank sends a description of what it has, some 100 bytes a tensor, n - 1 times.

    >>> import tempfile, torch
    >>> import functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> def program(stage, use):
    ...     step = T.zero(stage)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.adamw(0.1)))
    ...     state, _ = step(step.init({"w": torch.arange(5.0)}), torch.ones(5))
    ...     return use(step, state)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = comm.simulate(lambda: program(3, lambda step, state: fds.save(state, folder)), world_size=3)
    ...     loaded = comm.simulate(
    ...         lambda: program(1, lambda step, state: step.params(fds.load(folder, like=state))["w"].tolist()), world_size=2
    ...     )
    >>> loaded == [program(0, lambda step, state: step.params(state)["w"].tolist())] * 2
    True
    """
    saver = Saver(path, group=group, keep_last=keep_last, keep_every=keep_every)
    with saver:
        return saver._start(state, tag, extra, apart=False)
