"""Named tensors as a checkpoint, without a state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from functional_ds.state_dict.describe import TensorShard

from .directory import Retention, check_free, check_pointer, check_tag, clean, make_folder, staging, take_lock
from .shard_plan import SaveRequest, assign_writes, metadata_of
from .writer import CheckpointWriter, PendingCheckpoint, WriteData


def save_named(
    tensors: Mapping[str, Tensor], path: str | Path, *, tag: str, step: int = 0, extra: Mapping[str, Any] | None = None
) -> None:
    """Writes tensors as a checkpoint that ``load`` reads, from this process only.

    Args:
        tensors: by the names that ``describe`` gives: ``params/<leaf>``, ``optimizer.exp_avg/<leaf>``, ``step``.
        path: a folder; created if missing.
        tag: the checkpoint's name.
        step: the number of updates, for the folder's listing.
        extra: JSON values to store with the tensors.

    Raises:
        ValueError: the tag is not a plain name.
        BusyError: another job saves into this folder.
        CheckpointError: it cannot be written, or belongs to another library.

    >>> import tempfile, torch
    >>> import functional_ds as fds
    >>> state = fds.train_step(lambda params, x: params["w"].sum(), fds.sgd(0.1)).init({"w": torch.zeros(3)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_named({"params/w": torch.arange(3.0)}, folder, tag="converted")
    ...     fds.load(folder, like=state, only="params").params["w"].tolist()
    [0.0, 1.0, 2.0]
    """
    check_tag(tag)
    folder = make_folder(path)
    check_pointer(folder)
    lock = take_lock(folder)
    try:
        clean(folder)
        check_free(folder, tag)
        shards = [TensorShard.whole(name, x.contiguous()) for name, x in tensors.items()]
        ranks = [metadata_of(shards)]
        tasks = assign_writes(ranks)
        request = SaveRequest(tag, step, (), dict(extra or {}), staging(folder))
        writer = CheckpointWriter(
            PendingCheckpoint(folder, request, ranks, tasks, Retention(), lock), 0, WriteData.of(shards, tasks[0])
        )
        try:
            writer.join()
        except BaseException:
            writer.give_up()
            raise
    finally:
        lock.release()
