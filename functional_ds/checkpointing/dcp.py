"""A checkpoint's data for ``torch.distributed.checkpoint``'s planners."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from functional_ds.sharding.leaf_region import Box, grouped, stretches
from functional_ds.state_dict.describe import TensorShard
from functional_ds.state_dict.errors import DamagedError, StructureError

from . import storage
from .directory import open_manifest
from .manifest import BLOCK, Chunk, Manifest, StoredTensor

__all__ = ["BoxLoadPlanner", "CheckpointReader", "LocalBoxes"]

_STAGED = 64 << 20  # bytes that are read at once into memory other than the target's, where the target cannot take them


@attrs.frozen(eq=False)
class LocalBoxes:
    """A global tensor of this shape, of which a rank wants so many elements, and its boxes with views of the rank's memory.

    It implements torch's protocol for checkpointable tensors. A rank's shard is a range of a flattened slice; boxes are what
    it is in the whole tensor. So, whatever the ranks, stages, units and slices were at the save and are now, a load reads where
    boxes overlap. Where no dim but the first is cut, tensors are flat, and a box is a range.
    """

    shape: tuple[int, ...]
    wanted: int
    boxes: tuple[tuple[Box, Tensor], ...] = attrs.field(repr=False)

    def size(self) -> torch.Size:
        """The global tensor's size."""
        return torch.Size(self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [described(box) for box, _ in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.index is not None and index.index < len(self.boxes):
            box, view = self.boxes[index.index]
            if index.offset == torch.Size(box.start):
                return view
        for box, view in self.boxes:  # the number in the index is a hint only
            if index.offset == torch.Size(box.start):
                return view
        raise KeyError(f"{index.fqn}: this rank has no shard at {index.offset}")


class BoxLoadPlanner(DefaultLoadPlanner):
    """torch's planner for a dict of ``LocalBoxes``. Several names fill each of the ``shared`` scalars, and must agree."""

    def __init__(self, shared: Sequence[Tensor] = ()) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shared = {view.data_ptr() for view in shared}
        self._given: dict[int, tuple[str, Tensor]] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Takes what is to be loaded, and what the checkpoint holds."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Which elements of the checkpoint fill which shard.

        Raises:
            DamagedError: the checkpoint does not have all of a tensor.
        """
        plan = super().create_local_plan()
        found = Counter[str]()
        for item in plan.items:
            found[item.dest_index.fqn] += item.lengths.numel()
        for name, tensor in self.state_dict.items():
            wanted = tensor.wanted
            if found[name] != wanted:
                raise DamagedError(f"the checkpoint holds {found[name]} of {wanted} elements of {name} that this rank needs")
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The shard that an item fills."""
        tensor: LocalBoxes = self.state_dict[index.fqn]
        return tensor.__get_tensor_shard__(index)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The memory that an item is read into; for a shared scalar new memory, as several items fill it."""
        place: Tensor = super().resolve_tensor(read_item)
        return torch.empty_like(place) if place.data_ptr() in self._shared else place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Takes an item that was read; compares the values of a shared scalar."""
        place, name = self.lookup_tensor(read_item.dest_index), read_item.dest_index.fqn
        if place.data_ptr() in self._shared:
            before = self._given.setdefault(place.data_ptr(), (name, tensor))
            if not torch.equal(before[1], tensor):
                raise StructureError(
                    f"{name} is {tensor.item()} and {before[0]} is {before[1].item()}, but in like one number stands for both; "
                    "put these leaves into different units"
                )
            place.copy_(tensor)


@attrs.frozen(eq=False)
class _Part:
    """A part of what an item wants that one read brings: from the item's position ``low`` on, from a byte of a file on."""

    item: ReadItem
    box: Box
    low: tuple[int, ...]
    position: int


@attrs.define(eq=False)
class CheckpointReader(StorageReader):
    """A checkpoint as torch's loaders read it: ``dcp.load({"params/w": flat}, storage_reader=CheckpointReader(path, tag))``.

    Tensors are flat, but for those that were saved in slices, which have their shapes, as ``manifest.tensors[name].shape`` says
    them for all. Checksums are verified, and nothing is unpickled.
    """

    folder: Path = attrs.field(converter=Path)
    tag: str
    place: Path = attrs.field(init=False)
    manifest: Manifest = attrs.field(init=False)
    _stored: dict[str, dict[torch.Size, tuple[Chunk, Box]]] = attrs.field(init=False, factory=dict)  # by name and first place

    def __attrs_post_init__(self) -> None:
        self.place, self.manifest = open_manifest(self.folder, self.tag)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a reader keeps no state between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest as torch's metadata."""
        whole = {name: tensor for name, tensor in self.manifest.tensors.items() if tensor.whole}
        return Metadata({name: self.boxes_of(name, range(len(t.shape)) if _cut(t) else ()) for name, t in whole.items()})

    def fill(self, wanted: Mapping[str, Sequence[TensorShard]]) -> None:
        """Reads the shards that tensors of these names are to fill."""
        found = {name: self.local(name, shards) for name, shards in wanted.items()}
        planner = BoxLoadPlanner([shard.view for shards in wanted.values() for shard in shards if shard.shared])
        metadata = Metadata({name: there for name, (_, there) in found.items()})
        planner.set_up_planner({name: boxes for name, (boxes, _) in found.items()}, metadata)
        self.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()

    def local(self, name: str, shards: Sequence[TensorShard]) -> tuple[LocalBoxes, TensorStorageMetadata]:
        """The boxes that shards of a tensor are to be filled with, and the tensor as torch describes it near them."""
        stored = self.manifest.tensors[name]
        dims = sorted({dim for region in (*stored.slices, *(shard.region for shard in shards)) for dim in region.dims})
        own = tuple(
            (box, box.view(shard.view, shard.offset))
            for shard in shards
            for box in shard.region.boxes(shard.offset, shard.offset + shard.view.numel(), dims)
        )
        near = [
            (min((box.start[i] for box, _ in own), default=0), max((box.start[i] + box.shape[i] for box, _ in own), default=0))
            for i in range(len(grouped(stored.shape, dims)))
        ]
        wanted = sum(shard.view.numel() for shard in shards)
        return LocalBoxes(grouped(stored.shape, dims), wanted, own), self.boxes_of(name, dims, near)

    def boxes_of(self, name: str, dims: Sequence[int], near: Sequence[tuple[int, int]] | None = None) -> TensorStorageMetadata:
        """A tensor as torch describes it: the boxes that its chunks make.

        Args:
            name: the tensor.
            dims: the dims that count, see ``LeafRegion.boxes``.
            near: leaves out chunks that have nothing between these positions along the dims.
        """
        stored, found = self.manifest.tensors[name], dict[torch.Size, tuple[Chunk, Box]]()
        for chunk in stored.chunks:
            region, stop = stored.slices[chunk.slice], chunk.offset + chunk.numel
            if near is None or _meet(near, region.bounds(chunk.offset, stop, dims)):
                found |= {torch.Size(box.start): (chunk, box) for box in region.boxes(chunk.offset, stop, dims)}
        self._stored[name] = found
        chunks = [described(box) for _, box in found.values()]
        return TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(grouped(stored.shape, dims)), chunks)

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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items, file by file from front to back; directly into targets on the host that have the stored dtype."""
        by_file: dict[int, list[_Part]] = {}
        for item in plan.items:
            chunk, box = self._stored[item.storage_index.fqn][torch.Size(item.storage_index.offset or ())]
            size = self.manifest.tensors[item.storage_index.fqn].dtype.itemsize
            box = box.part(item.storage_offsets, item.lengths)
            parts = [box] if box.dense else list(stretches(box, gap=BLOCK // size, most=_STAGED // size))
            for part in parts:
                low = tuple(a - b for a, b in zip(part.start, box.start, strict=True))
                position = chunk.position + (part.place - chunk.offset) * size
                by_file.setdefault(chunk.file, []).append(_Part(item, part, low, position))
        for index, found in sorted(by_file.items()):
            self._read_file(index, sorted(found, key=lambda part: part.position), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, index: int, parts: list[_Part], planner: LoadPlanner) -> None:
        requests: list[storage.ReadRequest] = []
        targets: list[tuple[_Part, Tensor, Tensor]] = []
        staged = 0
        for part in parts:
            whole = planner.resolve_tensor(part.item).detach()
            target = whole[tuple(slice(a, a + n) for a, n in zip(part.low, part.box.shape, strict=True))]
            dtype = self.manifest.tensors[part.item.storage_index.fqn].dtype
            direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous() and part.box.dense
            into = target.reshape(-1) if direct else torch.empty(part.box.extent, dtype=dtype)
            staged += 0 if direct else into.numel() * into.element_size()
            requests.append(storage.ReadRequest(part.position, into.view(torch.uint8).numpy().data))
            targets.append((part, into, target))
            if staged > _STAGED:
                self._finish(index, requests, targets, planner)
                requests, targets, staged = [], [], 0
        self._finish(index, requests, targets, planner)

    def _finish(
        self,
        index: int,
        requests: list[storage.ReadRequest],
        targets: list[tuple[_Part, Tensor, Tensor]],
        planner: LoadPlanner,
    ) -> None:
        storage.read(self.place, self.manifest.files[index], requests=requests)
        for part, into, target in targets:
            if into.data_ptr() != target.data_ptr():
                target.copy_(part.box.view(into, part.box.place))
            planner.commit_tensor(part.item, target)


def described(box: Box) -> ChunkStorageMetadata:
    """A box as torch describes it."""
    return ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))


def _cut(tensor: StoredTensor) -> bool:
    return any(region.ranges for region in tensor.slices)


def _meet(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))
