"""A checkpoint's data for ``torch.distributed.checkpoint``'s planners."""

import os
from collections import Counter
from collections.abc import Sequence
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from functional_ds.state_dict.errors import DamagedError, StructureError

from . import storage
from .directory import open_manifest
from .manifest import Chunk, Manifest

__all__ = ["CheckpointReader", "FlatLoadPlanner", "FlatShards", "write_item"]

_STAGED = 64 << 20  # bytes that are read at once into memory other than the target's, where the target cannot take them


class FlatLoadPlanner(DefaultLoadPlanner):
    """torch's planner for a dict of ``FlatShards``. Several names fill each of the ``shared`` scalars, and must agree."""

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
            wanted = sum(view.numel() for _, view in tensor.shards)
            if found[name] != wanted:
                raise DamagedError(f"the checkpoint holds {found[name]} of {wanted} elements of {name} that this rank needs")
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The shard that an item fills."""
        tensor: FlatShards = self.state_dict[index.fqn]
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


@attrs.define(eq=False)
class CheckpointReader(StorageReader):
    """A checkpoint as torch's loaders read it: ``dcp.load({"params/w": flat}, storage_reader=CheckpointReader(path, tag))``.

    Every tensor is flat; ``manifest.tensors[name].shape`` has its shape. Checksums are verified, and nothing is unpickled.
    """

    folder: Path = attrs.field(converter=Path)
    tag: str
    place: Path = attrs.field(init=False)
    manifest: Manifest = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.place, self.manifest = open_manifest(self.folder, self.tag)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a reader keeps no state between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest as torch's metadata."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(stored.dtype),
                    torch.Size([stored.numel]),
                    [chunk(c.offset, c.numel) for c in stored.chunks],
                )
                for name, stored in self.manifest.tensors.items()
            }
        )

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
        by_file: dict[int, list[tuple[int, ReadItem]]] = {}
        for item in plan.items:
            found = self._chunk(item)
            size = self.manifest.tensors[item.storage_index.fqn].dtype.itemsize
            by_file.setdefault(found.file, []).append((found.position + item.storage_offsets[0] * size, item))
        for index, items in sorted(by_file.items()):
            self._read_file(index, sorted(items, key=lambda pair: pair[0]), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, item: ReadItem) -> Chunk:
        chunks = self.manifest.tensors[item.storage_index.fqn].chunks
        index = item.storage_index.index
        return chunks[0 if index is None else index]

    def _read_file(self, index: int, items: list[tuple[int, ReadItem]], planner: LoadPlanner) -> None:
        requests: list[storage.ReadRequest] = []
        targets: list[tuple[ReadItem, Tensor, Tensor]] = []
        staged = 0
        for position, item in items:
            target = planner.resolve_tensor(item).detach()
            dtype = self.manifest.tensors[item.storage_index.fqn].dtype
            direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
            into = target if direct else torch.empty(target.shape, dtype=dtype)
            staged += 0 if direct else into.numel() * into.element_size()
            requests.append(storage.ReadRequest(position, into.reshape(-1).view(torch.uint8).numpy().data))
            targets.append((item, into, target))
            if staged > _STAGED:
                self._finish(index, requests, targets, planner)
                requests, targets, staged = [], [], 0
        self._finish(index, requests, targets, planner)

    def _finish(
        self,
        index: int,
        requests: list[storage.ReadRequest],
        targets: list[tuple[ReadItem, Tensor, Tensor]],
        planner: LoadPlanner,
    ) -> None:
        storage.read(self.place, self.manifest.files[index], requests=requests)
        for item, into, target in targets:
            if into is not target:
                target.copy_(into)
            planner.commit_tensor(item, target)


@attrs.frozen(eq=False)
class FlatShards:
    """A flattened global tensor of ``numel`` elements, and this rank's flat shards of it with their offsets.

    It implements torch's protocol for checkpointable tensors. It is flat because a rank's shards are ranges of flattened
    leaves: whatever the ranks, stages and units were at the save and are now, a load reads where ranges overlap.
    """

    numel: int
    shards: tuple[tuple[int, Tensor], ...] = attrs.field(repr=False)

    def size(self) -> torch.Size:
        """The global tensor's size."""
        return torch.Size([self.numel])

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [write_item(fqn, self.numel, offset, view.numel(), view.dtype) for offset, view in self.shards]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk(offset, view.numel()) for offset, view in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.index is not None and index.index < len(self.shards):
            offset, view = self.shards[index.index]
            if index.offset == torch.Size([offset]):
                return view
        for offset, view in self.shards:  # the number in the index is a hint only
            if index.offset == torch.Size([offset]):
                return view
        raise KeyError(f"{index.fqn}: this rank has no shard at {index.offset}")


def chunk(offset: int, numel: int) -> ChunkStorageMetadata:
    """A range of elements as torch describes it."""
    return ChunkStorageMetadata(torch.Size([offset]), torch.Size([numel]))


def write_item(name: str, total: int, offset: int, numel: int, dtype: torch.dtype) -> WriteItem:
    """A range of elements to be written, as torch describes it."""
    return WriteItem(
        index=MetadataIndex(name, [offset]),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk(offset, numel), TensorProperties(dtype), torch.Size([total])),
    )
