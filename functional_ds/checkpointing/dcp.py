"""Reads the parts of a checkpoint that overlap with a rank's shards; also for ``torch.distributed.checkpoint``'s loaders."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from functional_ds.sharding.leaf_region import Box, grouped, stretches
from functional_ds.state_dict.describe import TensorShard
from functional_ds.state_dict.errors import DamagedError, StructureError
from functional_ds.state_dict.matching import FORMS

from . import storage
from .directory import open_manifest
from .manifest import BLOCK, Chunk, Manifest

_STAGED = 64 << 20  # bytes that are read at once into memory other than the target's, where the target cannot take them


@attrs.frozen(eq=False)
class _Read:
    """A part of a chunk, as a box in the flattened slice, and the memory of its shape that it is read into."""

    chunk: Chunk
    dtype: torch.dtype
    box: Box
    target: Tensor

    @property
    def position(self) -> int:
        """The byte of the file at which it begins."""
        return self.chunk.position + (self.box.place - self.chunk.offset) * self.dtype.itemsize

    def part(self, box: Box) -> "_Read":
        """The memory for a box inside."""
        place = tuple(slice(a - b, a - b + n) for a, b, n in zip(box.start, self.box.start, box.shape, strict=True))
        return attrs.evolve(self, box=box, target=self.target[place])


@attrs.define(eq=False)
class CheckpointReader(StorageReader):
    """A checkpoint as a storage reader: ``dcp.load({"params/w": flat}, storage_reader=CheckpointReader(path, tag))``.

    Tensors are flat, except those that were saved in slices, which have their shapes; ``manifest.tensors[name].shape`` has all
    shapes. Checksums are verified, and nothing is unpickled.
    """

    folder: Path = attrs.field(converter=Path)
    tag: str
    place: Path = attrs.field(init=False)
    manifest: Manifest = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.place, self.manifest = open_manifest(self.folder, self.tag)

    def params(self) -> dict[str, str]:
        """From the path of each leaf of the params to the name of its most exact values."""
        names: dict[str, str] = {}
        for form in reversed(FORMS):
            whole = (name for name, stored in self.manifest.tensors.items() if stored.whole and name.startswith(f"{form}/"))
            names |= {name.removeprefix(f"{form}/"): name for name in whole}
        return names

    def whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The whole tensors of these names, on the CPU."""
        stored = {name: self.manifest.tensors[name] for name in names}
        values = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in stored.items()}
        self.fill({name: [TensorShard.whole(name, value)] for name, value in values.items()})
        return values

    def fill(self, wanted: Mapping[str, Sequence[TensorShard]]) -> None:
        """Reads the shards of tensors of these names. Several names may fill a shared scalar, and must agree.

        A rank's shard is a range of a flattened slice; boxes are its parts in the whole tensor. A load reads where the boxes of
        the save and of the load overlap, for any ranks, stages, units and slices of both.

        Raises:
            DamagedError: the checkpoint does not have all of a tensor; a file is damaged.
            StructureError: one scalar would get different values.
        """
        scalars = [
            (name, shard.view, torch.empty_like(shard.view))
            for name, shards in wanted.items()
            for shard in shards
            if shard.shared
        ]
        fresh = {(name, view.data_ptr()): value for name, view, value in scalars}
        self._read([read for name, shards in wanted.items() for read in self._overlaps(name, shards, fresh)])
        given: dict[int, tuple[str, Tensor]] = {}
        for name, view, value in scalars:
            before, other = given.setdefault(view.data_ptr(), (name, value))
            if not torch.equal(other, value):
                raise StructureError(
                    f"{name} is {value.item()} and {before} is {other.item()}, but like has one number for both; "
                    "put these leaves into different units"
                )
            view.copy_(value)

    def _overlaps(self, name: str, shards: Sequence[TensorShard], fresh: Mapping[tuple[str, int], Tensor]) -> Iterator[_Read]:
        """The parts that fill shards of a tensor; shared scalars' values are read into separate memory."""
        stored = self.manifest.tensors[name]
        dims = sorted({dim for region in (*stored.slices, *(shard.region for shard in shards)) for dim in region.dims})
        boxes = [
            (box, box.view(fresh.get((name, shard.view.data_ptr()), shard.view), shard.offset))
            for shard in shards
            for box in shard.region.boxes(shard.offset, shard.offset + shard.view.numel(), dims)
        ]
        near = [
            (
                min((box.start[i] for box, _ in boxes), default=0),
                max((box.start[i] + box.shape[i] for box, _ in boxes), default=0),
            )
            for i in range(len(grouped(stored.shape, dims)))
        ]
        count, needed = 0, sum(shard.view.numel() for shard in shards)
        for chunk, box in self._boxes(name, dims, near):
            for mine, view in boxes:
                both = [
                    (max(a, b), min(a + n, b + m))
                    for a, n, b, m in zip(box.start, box.shape, mine.start, mine.shape, strict=True)
                ]
                size = [high - low for low, high in both]
                if min(size, default=1) > 0:
                    count += math.prod(size)
                    part = box.part([low - a for (low, _), a in zip(both, box.start, strict=True)], size)
                    place = tuple(slice(low - a, high - a) for (low, high), a in zip(both, mine.start, strict=True))
                    yield _Read(chunk, stored.dtype, part, view[place])
        if count != needed:
            raise DamagedError(f"the checkpoint holds {count} of {needed} elements of {name} that this rank needs")

    def _boxes(
        self, name: str, dims: Sequence[int], near: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[tuple[Chunk, Box]]:
        """The boxes of a tensor's chunks.

        Args:
            name: the tensor.
            dims: the dims that matter, see ``LeafRegion.boxes``.
            near: leaves out chunks that have nothing between these positions along the dims.
        """
        stored = self.manifest.tensors[name]
        for chunk in stored.chunks:
            region, stop = stored.slices[chunk.slice], chunk.offset + chunk.numel
            if near is None or _meet(near, region.bounds(chunk.offset, stop, dims)):
                for box in region.boxes(chunk.offset, stop, dims):
                    yield chunk, box

    def _read(self, reads: Iterable[_Read]) -> None:
        """Reads file by file from front to back; directly into targets on the host that have the stored dtype."""
        by_file: dict[int, list[_Read]] = {}
        for read in reads:
            size = read.dtype.itemsize
            boxes = [read.box] if read.box.dense else stretches(read.box, gap=BLOCK // size, most=_STAGED // size)
            by_file.setdefault(read.chunk.file, []).extend(map(read.part, boxes))
        for index, parts in sorted(by_file.items()):
            self._read_file(index, sorted(parts, key=lambda part: part.position))

    def _read_file(self, index: int, parts: Sequence[_Read]) -> None:
        requests: list[storage.ReadRequest] = []
        staged: list[tuple[_Read, Tensor]] = []
        held = 0
        for part in parts:
            target = part.target
            direct = target.device.type == "cpu" and target.dtype == part.dtype and target.is_contiguous() and part.box.dense
            into = target.reshape(-1) if direct else torch.empty(part.box.extent, dtype=part.dtype)
            requests.append(storage.ReadRequest(part.position, into.view(torch.uint8).numpy().data))
            if not direct:
                staged.append((part, into))
                held += into.nbytes
            if held > _STAGED:
                self._finish(index, requests, staged)
                requests, staged, held = [], [], 0
        self._finish(index, requests, staged)

    def _finish(self, index: int, requests: Sequence[storage.ReadRequest], staged: Sequence[tuple[_Read, Tensor]]) -> None:
        storage.read(self.place, self.manifest.files[index], requests=requests)
        for part, into in staged:
            part.target.copy_(part.box.view(into, part.box.place))

    # -- for torch's loaders -----------------------------------------------------------------------------------------------

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest as torch's metadata."""
        return Metadata({name: self._described(name) for name, tensor in self.manifest.tensors.items() if tensor.whole})

    def _described(self, name: str) -> TensorStorageMetadata:
        stored, dims = self.manifest.tensors[name], self._dims(name)
        chunks = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for _, box in self._boxes(name, dims)]
        return TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(grouped(stored.shape, dims)), chunks)

    def _dims(self, name: str) -> range:
        """All dims of a tensor that was saved in slices; none of others, which are flat."""
        stored = self.manifest.tensors[name]
        return range(len(stored.shape) if any(region.ranges for region in stored.slices) else 0)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of torch's plan."""
        known = {
            (name, torch.Size(box.start)): (chunk, box)
            for name in {item.storage_index.fqn for item in plan.items}
            for chunk, box in self._boxes(name, self._dims(name))
        }
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        reads = []
        for item, target in zip(plan.items, targets, strict=True):
            name = item.storage_index.fqn
            chunk, box = known[name, torch.Size(item.storage_index.offset or ())]
            part = box.part(item.storage_offsets, item.lengths)
            reads.append(_Read(chunk, self.manifest.tensors[name].dtype, part, target))
        self._read(reads)
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a reader keeps no state between loads."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan itself."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans themselves."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a folder."""
        return Path(checkpoint_id).is_dir()


def _meet(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))
