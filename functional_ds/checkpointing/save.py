"""``Saver``: asynchronous checkpoints, written while training continues; ``save``, and ``save_named`` without a state."""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
from torch import Tensor

from functional_ds import comm
from functional_ds.base.disk.files import FileLock, checked_path
from functional_ds.comm.record.group import Solo
from functional_ds.state_dict.all_or_none import all_or_none, gather_or_none
from functional_ds.state_dict.describe import TensorShard, describe_in_place
from functional_ds.state_dict.errors import CheckpointError
from functional_ds.state_dict.fingerprint import fingerprints
from functional_ds.step.state.buffers import BUFFERS, Buffers
from functional_ds.step.state.state import State

from .directory import Retention, check_free, check_pointer, check_tag, clean, make_folder, staging, take_lock
from .shard_plan import SaveRequest, ShardMetadata, WriteTask, assign_writes, metadata_of, replicated, with_fingerprints
from .writer import CheckpointWriter, PendingCheckpoint, WriteData

_Described = Callable[[], tuple[int, list[TensorShard]]]  # the number of updates, and this rank's shards


class Saver:
    """Saves into one folder asynchronously. No other job can save there while it is open.

    ``save`` copies what this rank will write and returns. A thread of each rank writes the copy, and rank 0 publishes the
    checkpoint when all have written. There is one copy, whose memory is reused: ``save`` first waits for the previous save. The
    next ``save`` or ``wait`` raises an error of any rank's writer on every rank; earlier checkpoints are unaffected.

    ``save``, ``wait``, the constructor, and leaving the ``with`` block without an error (which waits) are collective over
    ``group``. After an error, or on ``close``, a pending save is finished if this rank can finish it alone.

    Args:
        path: a folder that all ranks see; created if missing.
        group: the ranks that states are spread over; None for the whole world.
        keep_last: how many of the newest checkpoints that were saved with ``keep_last`` to keep; None for all.
        keep_every: also keep those whose number of updates is a multiple of this.

    Raises:
        ValueError: ``keep_last`` or ``keep_every`` is out of range.
        BusyError: another job, or another Saver, saves into this folder.
        CheckpointError: the folder cannot be created or written, or belongs to another library.

    >>> import tempfile
    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
    >>> state = step.init({"w": torch.ones(2)})
    >>> with tempfile.TemporaryDirectory() as folder, Saver(folder, keep_last=2) as saver:
    ...     for _ in range(3):
    ...         state, _ = step(state, torch.ones(2))
    ...         tag = saver.save(state, extra={"rows": 2})
    ...     saver.wait()
    ...     fds.checkpointing.tags(folder)
    ['2', '3']
    """

    def __init__(
        self,
        path: str | Path,
        *,
        group: comm.Group | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        self._retention = Retention(keep_last, keep_every)
        self._group = (comm.world() if group is None else group).channel("checkpoint")
        self._lock: FileLock | None = None
        self._writer: CheckpointWriter | None = None
        self._buffer: Tensor | None = None  # of the last snapshot
        self._closed = False
        try:
            self.folder: Path = all_or_none(self._group, lambda: self._open(checked_path(path)))
        except BaseException:  # another rank's error leaves the folder unlocked, too
            self._release()
            raise

    def __repr__(self) -> str:
        return f"Saver({str(self.folder)!r}{', closed' if self._closed else ''})"

    def save(self, state: State, *, tag: str | None = None, extra: Mapping[str, Any] | None = None) -> str:
        """Starts a save of the present state, and returns its tag. The step may donate the state afterwards.

        Collective. It takes as long as one copy of what this rank writes, if the previous save is over.

        Args:
            state: of any step.
            tag: the checkpoint's name; by default the number of updates.
            extra: JSON values to store with the state; rank 0's are used.

        Raises:
            ValueError: the tag is not a plain name.
            TypeError: ``state`` is not a state; ``extra`` is not JSON; a leaf is neither a tensor nor a number.
            CheckpointError: the previous save, or the start of this one, failed on some rank; the folder has an entry of the
                tag's name that is not a checkpoint; the Saver is closed.
        """
        return self._start(partial(_described, state), tag=tag, extra=extra, snapshot=True)

    def wait(self) -> None:
        """Waits until the last save is published; raises its error if it failed. Collective."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            all_or_none(self._group, writer.join_write)
            all_or_none(self._group, writer.join)
        except BaseException:
            writer.give_up()
            raise

    def check(self) -> None:
        """Raises the error of this rank's writer, if it has failed so far. Not collective; does not wait."""
        if self._writer is not None:
            self._writer.check()

    @property
    def failed(self) -> bool:
        """Whether this rank's writer has failed so far; ``wait`` raises its error on all ranks."""
        return self._writer is not None and self._writer.error is not None

    def close(self) -> None:
        """Ends the pending save, if there is one, without the other ranks, and unlocks the folder.

        The save is published if all ranks finish writing, and abandoned after a timeout otherwise.
        """
        writer, self._writer, self._buffer, self._closed = self._writer, None, None, True
        try:
            if writer is not None:
                writer.join()
        finally:
            self._release()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            try:
                self.close()
            except CheckpointError:
                if error is None:
                    raise

    # -- the steps of a save -----------------------------------------------------------------------------------------------

    def _open(self, path: Path) -> Path:
        folder = path
        if self._group.rank == 0:
            folder = make_folder(path)
            check_pointer(folder)
            self._lock = take_lock(folder)
            clean(folder)
        return folder

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _start(self, describe: _Described, *, tag: str | None, extra: Mapping[str, Any] | None, snapshot: bool) -> str:
        """Starts a writer of the tensors' memory, or of a snapshot of it."""
        if self._closed:
            raise CheckpointError(f"this Saver of {self.folder} is closed; make another one")
        self.wait()
        group = self._group
        with ExitStack() as undo:
            (_, shards), requests = gather_or_none(
                group, lambda: self._request(describe, tag, extra, undo), share=lambda requested: requested[0]
            )
            ranks = self._fingerprinted([request.shards for request in requests], shards)
            request: SaveRequest = attrs.evolve(requests[0], shards=())
            tasks = assign_writes(ranks)
            data = all_or_none(group, lambda: self._data(request, shards, tasks[group.rank], snapshot))
            undo.pop_all()
        pending = PendingCheckpoint(self.folder, request, ranks, tasks, self._retention, self._lock)
        self._writer = CheckpointWriter(pending, group.rank, data)
        return request.tag

    def _request(
        self, describe: _Described, tag: str | None, extra: Any, undo: ExitStack
    ) -> tuple[SaveRequest, list[TensorShard]]:
        """What is to be saved, and this rank's shards of it. Rank 0 also makes the folder to write into."""
        (step, shards), values = describe(), _json(extra)
        tag = check_tag(str(step) if tag is None else tag)
        request = SaveRequest(tag, step, tuple(metadata_of(shards)))
        if self._group.rank == 0:
            if self._lock is not None and self._lock.lost:
                warnings.warn(f"{self.folder} was removed or replaced while a Saver was open; it is made anew", stacklevel=6)
                self._release()
                self._open(self.folder)
            check_free(self.folder, tag)
            staged = staging(self.folder)
            undo.callback(shutil.rmtree, staged, ignore_errors=True)
            request = attrs.evolve(request, extra=values, staged=staged)
        return request, shards

    def _fingerprinted(
        self, ranks: Sequence[Sequence[ShardMetadata]], shards: Sequence[TensorShard]
    ) -> Sequence[Sequence[ShardMetadata]]:
        """All ranks' metadata, with fingerprints of the shards that several ranks have."""
        indices = replicated(ranks)
        if not any(indices):
            return ranks
        views = [shards[i].view for i in indices[self._group.rank]]
        _, numbers = gather_or_none(self._group, lambda: fingerprints(views), share=lambda values: values)
        return [
            with_fingerprints(metadata, which, numbers=new)
            for metadata, which, new in zip(ranks, indices, numbers, strict=True)
        ]

    def _data(
        self, request: SaveRequest, shards: Sequence[TensorShard], tasks: Sequence[WriteTask], snapshot: bool
    ) -> WriteData:
        if not request.staged.is_dir():
            raise CheckpointError(f"{request.staged}: rank 0 made this folder; all ranks must see the same file system at path")
        data = WriteData.of(shards, tasks)
        if snapshot:
            data = data.snapshot(self._buffer)
            self._buffer = data.buffer
        return data


def _json(extra: Any) -> Any:
    """A deep copy of JSON values."""
    try:
        return json.loads(json.dumps({} if extra is None else dict(extra)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra={extra!r} must be a dict of JSON values: {error}") from error


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
    """Writes a state as the checkpoint ``tag`` in the folder ``path``, and returns the tag when it is published.

    ``load_M ∘ save_N = id``, bitwise, for any numbers of ranks N and M, stages, units, meshes and slices.

    Collective over ``group``. Each element is written by one of the ranks that have it, directly from the state's memory; a
    rank needs a few MB more, and for offloaded tensors two pieces of a file. A checkpoint with the same tag is replaced. If the
    save fails, earlier checkpoints stay loadable.

    Args:
        state: of any step; it is not changed.
        path: a folder that all ranks see; created if missing.
        tag: the checkpoint's name; by default the number of updates.
        group: the ranks that the state is spread over; None for the whole world.
        keep_last: how many of the newest checkpoints that were saved with ``keep_last`` to keep; None for all.
        keep_every: also keep those whose number of updates is a multiple of this.
        extra: JSON values to store with the state (such as the data's position); rank 0's are used.

    Raises:
        ValueError: the tag is not a plain name; ``keep_last`` or ``keep_every`` is out of range.
        TypeError: ``state`` is not a state; ``extra`` is not JSON; a leaf is neither a tensor nor a number.
        BusyError: another job, or an open Saver, saves into this folder.
        CheckpointError: a rank could not write; the folder has an entry of the tag's name that is not a checkpoint, or belongs
            to another library.

    Cost: each rank sends a description of its shards, about 100 bytes per tensor, n - 1 times.

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
    with Saver(path, group=group, keep_last=keep_last, keep_every=keep_every) as saver:
        return saver._start(partial(_described, state), tag=tag, extra=extra, snapshot=False)


def _described(state: State) -> tuple[int, list[TensorShard]]:
    if not isinstance(state, State):
        raise TypeError(f"state={type(state).__name__}: save takes the state that a step made")
    buffers = state.slots.get(BUFFERS)
    lost = buffers.unsaved() if isinstance(buffers, Buffers) else []
    if lost:
        warnings.warn(
            f"state: forward passes have set {', '.join(lost)} to what no checkpoint has (None, strings, objects, modes, or "
            "nothing by del), so a run that is resumed begins with what the module was built with; use tensors and numbers",
            stacklevel=7,
        )
    return int(state.step), describe_in_place(state)


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
    shards = [TensorShard.whole(name, x.contiguous()) for name, x in tensors.items()]
    with Saver(path, group=comm.Group((0,), 0, "alone", Solo())) as saver:
        saver._start(lambda: (step, shards), tag=tag, extra=extra, snapshot=False)
