"""One save under way: a thread of each rank writes, and rank 0's publishes when all have written.

The threads talk by files alone: each rank that is through leaves a receipt in the hidden folder. So a checkpoint is
published as soon as it is complete, whatever the ranks' own threads do meanwhile, and no collective runs beside theirs.
"""

import contextlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from functional_ds.state_dict.describe import Held

from . import storage
from .dcp import Spread, write_item
from .directory import publish, retain, summaries, write_whole
from .errors import CheckpointError
from .manifest import DTYPES, MANIFEST, Chunk, DataFile, Manifest, Stored, Summary
from .shard_plan import Offer, Share

__all__ = ["Draft", "Image", "Planner", "Writer", "data_name", "stored_tensors"]

_STAGED = 16 << 20  # bytes that are copied from a device at once


class Planner(DefaultSavePlanner):
    """torch's planner for a dict of ``Spread``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The stretch that an item writes."""
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def stored_tensors(ranks: Sequence[Sequence[Offer]], shares: Sequence[Sequence[Share]]) -> dict[str, Stored]:
    """What the manifest says of all tensors: torch's global plan, with the place of each stretch in its rank's file.

    A rank's file is its shares, one after the other.
    """
    plans, places = [], {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, (offers, own) in enumerate(zip(ranks, shares, strict=True)):
        items, position = [], 0
        for share in own:
            offer = offers[share.index]
            shapes[share.name] = offer.shape
            items.append(write_item(share.name, math.prod(offer.shape), share.offset, share.numel, DTYPES[offer.dtype]))
            places[share.name, share.offset] = (rank, position)
            position += share.numel * offer.itemsize
        plans.append(SavePlan(items))
    _, metadata = create_default_global_save_plan(plans)
    return {name: _stored(name, shapes[name], metadata, places) for name in metadata.state_dict_metadata}


def _stored(name: str, shape: tuple[int, ...], metadata: Metadata, places: dict[tuple[str, int], tuple[int, int]]) -> Stored:
    found = metadata.state_dict_metadata[name]
    if not isinstance(found, TensorStorageMetadata):
        raise TypeError(f"{name} was planned as bytes")
    chunks = sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in found.chunks)
    return Stored(shape, found.properties.dtype, tuple(Chunk(o, n, *places[name, o]) for o, n in chunks))


@attrs.define(eq=False)
class Image:
    """What this rank writes: stretches of its state, or a snapshot of them, in the order in which they lie in its file."""

    views: list[Tensor]
    copy: Tensor | None = None

    @staticmethod
    def of(held: Sequence[Held], shares: Sequence[Share]) -> "Image":
        """This rank's shares, through torch's plan of them."""
        stretches: dict[str, list[tuple[int, Tensor]]] = {}
        totals: dict[str, int] = {}
        for share in shares:
            whole = held[share.index]
            start = share.offset - whole.offset
            stretches.setdefault(share.name, []).append((share.offset, whole.view[start : start + share.numel]))
            totals[share.name] = math.prod(whole.shape)
        planner = Planner()
        planner.set_up_planner({name: Spread(totals[name], tuple(found)) for name, found in stretches.items()})
        items = {(item.index.fqn, item.index.offset): item for item in planner.finish_plan(planner.create_local_plan()).items}
        ordered = [items[share.name, torch.Size([share.offset])] for share in shares]
        return Image([found for found in map(planner.resolve_data, ordered) if isinstance(found, Tensor)])

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(view.numel() * view.element_size() for view in self.views)

    def snapshot(self, into: Tensor | None) -> "Image":
        """A copy in the host's memory, in ``into`` if that fits; the state may change from then on."""
        size = self.size
        if into is None or into.numel() != size:
            into = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        place, devices = 0, set()
        for view in self.views:
            data = _bytes(view)
            into[place : place + data.numel()].copy_(data, non_blocking=True)
            place += data.numel()
            devices.add(view.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return Image([], into)

    def pieces(self) -> Iterator[memoryview]:
        """The bytes; what lies on a device is copied a little at a time."""
        if self.copy is not None:
            yield self.copy.numpy().data
        for view in self.views:
            data = _bytes(view)
            if data.device.type == "cpu":
                yield data.numpy().data
            else:
                for part in data.split(_STAGED):
                    yield part.cpu().numpy().data


def _bytes(view: Tensor) -> Tensor:
    return view.contiguous().view(torch.uint8)


_PAUSE = 0.02  # seconds between looks for receipts
_GRACE = 10.0  # seconds for the others once the program ends, or once they say that they are through


def data_name(rank: int) -> str:
    """A rank's data file."""
    return f"{rank:05d}.bin"


@attrs.frozen
class Draft:
    """A checkpoint that is to be.

    Attributes:
        folder: where it is to come.
        staged: the hidden folder that it is written into.
        tag: its name.
        step: the count of updates.
        ranks: how many write.
        tensors: makes where each tensor's stretches will lie; called on rank 0, where nothing waits for it.
        extra: the user's.
        keep_last: see ``save``.
        keep_every: see ``save``.
    """

    folder: Path
    staged: Path
    tag: str
    step: int
    ranks: int
    tensors: Callable[[], Mapping[str, Stored]] = attrs.field(repr=False)
    extra: Any
    keep_last: int | None
    keep_every: int | None


class Writer:
    """Writes this rank's image; on rank 0 it then publishes."""

    def __init__(self, draft: Draft, rank: int, image: Image) -> None:
        self.draft, self.rank = draft, rank
        self.error: BaseException | None = None
        self._image: Image | None = image
        self._written, self._given_up, self._all_written = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {draft.tag}, rank {rank}")
        self._thread.start()

    def join_write(self) -> None:
        """Returns once this rank's file is on the disk; raises what went wrong with it."""
        self._written.wait()
        self.check()

    def join(self) -> None:
        """Returns once the thread is over, on rank 0 hence once the checkpoint is published; all ranks have written."""
        self._all_written.set()
        self._thread.join()
        self.check()

    def give_up(self) -> None:
        """Ends the thread, whatever is missing; the checkpoint is not published, unless it is already."""
        self._given_up.set()
        self._thread.join()
        if self.rank == 0:
            shutil.rmtree(self.draft.staged, ignore_errors=True)

    def check(self) -> None:
        """Raises the thread's error, if it has one."""
        if self.error is not None:
            what = f"the checkpoint {self.draft.tag!r} could not be written into {self.draft.folder}"
            raise CheckpointError(f"{what}: {_told(self.error)}") from self.error

    def _run(self) -> None:
        try:
            file = self._write()
            self._image = None
            self._written.set()
            if self.rank == 0:
                self._publish(file)
        except BaseException as error:  # whatever it is, the rank's own thread must hear of it
            self.error = error
        finally:
            self._image = None
            self._written.set()

    def _write(self) -> DataFile:
        staged, path = self.draft.staged, self.draft.staged / data_name(self.rank)
        image = self._image
        if image is None:
            raise RuntimeError("this image was written already")
        try:
            file = storage.write(path, _until(image.pieces(), self._given_up))
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()  # on a full disk others may need the room
            raise
        if self.rank:
            note = {"size": file.size, "checks": "".join(f"{check:08x}" for check in file.checks)}
            write_whole(staged / f"{file.name}.receipt", json.dumps(note).encode())
        return file

    def _publish(self, own: DataFile) -> None:
        draft = self.draft
        files = [own, *(self._receipt(rank) for rank in range(1, draft.ranks))]
        sequence = 1 + max((summary.sequence for summary in summaries(draft.folder)), default=0)
        summary = Summary(draft.tag, sequence, draft.step, draft.keep_last is not None, draft.ranks)
        manifest = Manifest(summary, tuple(files), draft.tensors(), draft.extra)
        write_whole(draft.staged / MANIFEST, manifest.encode())
        if self._given_up.is_set():
            raise CheckpointError("it was given up")
        publish(draft.folder, draft.staged, draft.tag)
        retain(draft.folder, draft.tag, draft.keep_last, draft.keep_every)

    def _receipt(self, rank: int) -> DataFile:
        name = data_name(rank)
        path = self.draft.staged / f"{name}.receipt"
        self._wait_for(path, rank)
        note = json.loads(path.read_bytes())
        path.unlink()
        checks = note["checks"]
        return DataFile(name, note["size"], tuple(int(checks[i : i + 8], 16) for i in range(0, len(checks), 8)))

    def _wait_for(self, path: Path, rank: int) -> None:
        until: float | None = None
        while not path.exists():
            if until is None and (self._all_written.is_set() or not threading.main_thread().is_alive()):
                until = time.monotonic() + _GRACE
            if until is not None and time.monotonic() > until:
                raise CheckpointError(f"rank 0 sees no receipt of rank {rank} at {path}; do all ranks see one file system?")
            if self._given_up.wait(_PAUSE):
                raise CheckpointError("it was given up")


def _until(pieces: Iterator[memoryview], given_up: threading.Event) -> Iterator[memoryview]:
    for piece in pieces:
        if given_up.is_set():
            raise CheckpointError("it was given up")
        yield piece


def _told(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__
