"""One save in progress: a thread of each rank writes, and rank 0's publishes when all have written.

The threads communicate only through files: each rank leaves a receipt in the hidden folder when its data file is written. So a
checkpoint is published when it is complete, independently of the ranks' main threads, and without collectives.
"""

import contextlib
import json
import math
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor

from functional_ds.base.device import overlaps
from functional_ds.base.device_streams import current_stream
from functional_ds.base.disk.files import FileLock, read_regular, write_atomically
from functional_ds.state_dict.describe import TensorShard
from functional_ds.state_dict.errors import CheckpointError
from functional_ds.state_dict.stored_view import StoredView

from . import storage
from .directory import Retention, publish, retain, summaries
from .manifest import DTYPES, LONGEST, MANIFEST, Chunk, DataFile, Manifest, StoredTensor, Summary
from .shard_plan import SaveRequest, ShardMetadata, WriteTask

_CHUNK = 16 << 20  # bytes that are copied from a device at once


def stored_tensors(ranks: Sequence[Sequence[ShardMetadata]], tasks: Sequence[Sequence[WriteTask]]) -> dict[str, StoredTensor]:
    """The manifest's entries. A rank's file holds the elements of its tasks, one task after the other."""
    pieces: dict[str, list[tuple[ShardMetadata, Chunk]]] = {}
    for rank, (shards, written) in enumerate(zip(ranks, tasks, strict=True)):
        position = 0
        for task in written:
            shard = shards[task.index]
            pieces.setdefault(task.name, []).append((shard, Chunk(task.offset, task.numel, rank, position)))
            position += task.numel * shard.itemsize
    return {name: _stored(pieces) for name, pieces in pieces.items()}


def _stored(pieces: Sequence[tuple[ShardMetadata, Chunk]]) -> StoredTensor:
    first, slices = pieces[0][0], sorted({shard.region for shard, _ in pieces}, key=lambda region: region.ranges)
    number = {region: index for index, region in enumerate(slices)}
    chunks = [attrs.evolve(chunk, slice=number[shard.region]) for shard, chunk in pieces]
    ordered = tuple(sorted(chunks, key=lambda chunk: (chunk.slice, chunk.offset)))
    shape = first.region.shape
    whole = sum(chunk.numel for chunk in chunks) == math.prod(shape)
    return StoredTensor(shape, DTYPES[first.dtype], ordered, tuple(slices), whole)


@attrs.frozen(eq=False)
class WriteData:
    """What this rank writes, in file order: views of the state's memory, or one buffer with a copy of them."""

    views: tuple[Tensor | StoredView, ...] = attrs.field(repr=False)
    buffer: Tensor | None = attrs.field(default=None, repr=False)

    @staticmethod
    def of(shards: Sequence[TensorShard], tasks: Sequence[WriteTask]) -> "WriteData":
        """The elements that the tasks name."""
        starts = [(shards[task.index], task.offset - shards[task.index].offset, task.numel) for task in tasks]
        return WriteData(tuple(shard.view[start : start + numel] for shard, start, numel in starts))

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return sum(view.numel() * view.element_size() for view in self.views)

    def snapshot(self, buffer: Tensor | None) -> "WriteData":
        """A copy on the host; in ``buffer`` if it has the right size."""
        nbytes = self.nbytes
        if buffer is None or buffer.numel() != nbytes:
            pinned = any(overlaps(view.device) for view in self.views)
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        start, devices = 0, {view.device for view in self.views}
        for data in self._parts():
            into = buffer[start : start + data.numel()]
            if data.device.type == "cpu":  # one memcpy, which is quicker than torch's kernel
                np.copyto(into.numpy(), data.numpy())
            else:
                into.copy_(data, non_blocking=True)
            start += data.numel()
        for device in filter(overlaps, devices):
            current_stream(device).synchronize()
        return WriteData((), buffer)

    def pieces(self) -> Iterator[memoryview]:
        """The bytes; tensors on a device are copied in chunks."""
        if self.buffer is not None:
            yield self.buffer.numpy().data
        for data in self._parts():
            if data.device.type == "cpu":
                yield data.numpy().data
            else:
                for part in data.split(_CHUNK):
                    yield part.cpu().numpy().data

    def _parts(self) -> Iterator[Tensor]:
        """The views' bytes; offloaded ones are read piece by piece, each valid until the next."""
        for view in self.views:
            yield from map(_bytes, [view] if isinstance(view, Tensor) else view.pieces())


def _bytes(view: Tensor) -> Tensor:
    return view.contiguous().view(torch.uint8)


_PAUSE = 0.02  # seconds between two looks for a receipt
_GRACE = 10.0  # seconds that rank 0 waits for receipts after the program has ended, or all ranks have reported their files


def data_name(rank: int) -> str:
    """The name of a rank's data file."""
    return f"{rank:05d}.bin"


@attrs.frozen
class PendingCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        folder: the folder of checkpoints.
        request: rank 0's: tag, step, the user's values, and the hidden folder.
        ranks: what each rank has.
        tasks: what each rank writes.
        retention: which checkpoints stay afterwards.
        lock: on the folder; None on the other ranks.
    """

    folder: Path
    request: SaveRequest
    ranks: Sequence[Sequence[ShardMetadata]] = attrs.field(repr=False)
    tasks: Sequence[Sequence[WriteTask]] = attrs.field(repr=False)
    retention: Retention
    lock: FileLock | None = None

    @property
    def staged(self) -> Path:
        """The hidden folder."""
        return self.request.staged

    def manifest(self, files: Sequence[DataFile], sequence: int) -> Manifest:
        """The manifest, once all data files are written."""
        request = self.request
        summary = Summary(request.tag, sequence, request.step, self.retention.keep_last is not None, len(files))
        return Manifest(summary, tuple(files), stored_tensors(self.ranks, self.tasks), request.extra)


class CheckpointWriter:
    """Writes this rank's data in a thread. Rank 0's thread then publishes the checkpoint."""

    def __init__(self, pending: PendingCheckpoint, rank: int, data: WriteData) -> None:
        self.pending, self.rank = pending, rank
        self.error: BaseException | None = None
        self._data: WriteData | None = data
        self._written, self._given_up, self._all_written = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {pending.request.tag}, rank {rank}")
        self._thread.start()

    def join_write(self) -> None:
        """Waits until this rank's file is on disk; raises the error if that failed."""
        self._written.wait()
        self.check()

    def join(self) -> None:
        """Waits for the thread, which on rank 0 publishes the checkpoint. Call it when all ranks have written."""
        self._all_written.set()
        self._thread.join()
        self.check()

    def give_up(self) -> None:
        """Ends the thread. The checkpoint is not published, unless it already was."""
        self._given_up.set()
        self._thread.join()
        if self.rank == 0:
            shutil.rmtree(self.pending.staged, ignore_errors=True)

    def check(self) -> None:
        """Raises the thread's error, if it has one."""
        if self.error is not None:
            what = f"the checkpoint {self.pending.request.tag!r} could not be written into {self.pending.folder}"
            raise CheckpointError(f"{what}: {_message(self.error)}") from self.error

    def _run(self) -> None:
        try:
            file = self._write()
            self._data = None
            self._written.set()
            if self.rank == 0:
                self._publish(file)
        except BaseException as error:  # any error: the main thread raises it
            self.error = error
            if not threading.main_thread().is_alive():  # no other code will
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread)))
        finally:
            self._data = None
            self._written.set()

    def _write(self) -> DataFile:
        path, data = self.pending.staged / data_name(self.rank), self._data
        if data is None:
            raise RuntimeError("this data was written already")
        try:
            file = storage.write(path, _until(data.pieces(), self._given_up))
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()  # other ranks may need the space on a full disk
            raise
        if self.rank:
            write_atomically(_receipt(self.pending.staged, self.rank), json.dumps(file.encode()).encode())
        return file

    def _publish(self, file: DataFile) -> None:
        pending = self.pending
        files = [file, *(self._received(rank) for rank in range(1, len(pending.ranks)))]
        sequence = 1 + max((summary.sequence for summary in summaries(pending.folder)), default=0)
        manifest = pending.manifest(files, sequence).encode()
        if len(manifest) > LONGEST:  # no load would read it
            raise CheckpointError(f"its manifest has {len(manifest):,} bytes, and may have {LONGEST:,}; make extra= smaller")
        write_atomically(pending.staged / MANIFEST, manifest)
        if self._given_up.is_set():
            raise CheckpointError("it was given up")
        if pending.lock is not None and pending.lock.lost:
            raise CheckpointError("the folder was removed or replaced meanwhile")
        publish(pending.folder, pending.staged, tag=pending.request.tag)
        retain(pending.folder, pending.request.tag, retention=pending.retention)

    def _received(self, rank: int) -> DataFile:
        """Another rank's file, from its receipt."""
        path = _receipt(self.pending.staged, rank)
        self._wait_for(path, rank)
        receipt = json.loads(read_regular(path, limit=LONGEST))
        path.unlink()
        return DataFile.decode(*receipt)

    def _wait_for(self, path: Path, rank: int) -> None:
        deadline: float | None = None
        while not path.exists():
            if deadline is None and (self._all_written.is_set() or not threading.main_thread().is_alive()):
                deadline = time.monotonic() + _GRACE
            if deadline is not None and time.monotonic() > deadline:
                raise CheckpointError(f"rank 0 sees no receipt of rank {rank} at {path}; do all ranks see one file system?")
            if self._given_up.wait(_PAUSE):
                raise CheckpointError("it was given up")


def _receipt(staged: Path, rank: int) -> Path:
    return staged / f"{data_name(rank)}.receipt"


def _until(pieces: Iterator[memoryview], given_up: threading.Event) -> Iterator[memoryview]:
    for piece in pieces:
        if given_up.is_set():
            raise CheckpointError("it was given up")
        yield piece


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__
