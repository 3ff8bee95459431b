"""A checkpoint's data for ``torch.distributed.checkpoint``'s planners."""

import os
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

from . import storage
from .directory import open_manifest
from .errors import DamagedError, StructureError
from .manifest import Chunk, Manifest

__all__ = ["Planner", "Reader", "Spread", "write_item"]

_STAGED = 64 << 20  # bytes that are read beside their place at once, where they cannot be read into it


class Planner(DefaultLoadPlanner):
    """torch's planner for a dict of ``Spread``; ``shared`` are scalars that several names give, which must agree."""

    def __init__(self, shared: Sequence[Tensor] = ()) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shared = {view.data_ptr() for view in shared}
        self._given: dict[int, tuple[str, Tensor]] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """What is to be loaded, and what there is."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Which stretches of what is stored come where.

        Raises:
            DamagedError: the checkpoint does not have all of a tensor.
        """
        plan = super().create_local_plan()
        there: dict[str, int] = {}
        for item in plan.items:
            there[item.dest_index.fqn] = there.get(item.dest_index.fqn, 0) + item.lengths.numel()
        for name, spread in self.state_dict.items():
            wanted = sum(view.numel() for _, view in spread.stretches)
            if there.get(name, 0) != wanted:
                raise DamagedError(
                    f"the checkpoint holds {there.get(name, 0)} of {wanted} elements of {name} that this rank needs"
                )
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The stretch that an item fills."""
        spread: Spread = self.state_dict[index.fqn]
        return spread.__get_tensor_shard__(index)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where an item goes; what several names give is first read beside it."""
        place: Tensor = super().resolve_tensor(read_item)
        return torch.empty_like(place) if place.data_ptr() in self._shared else place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """What was read is in its place."""
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
class Reader(StorageReader):
    """A checkpoint as torch's loaders read it: ``dcp.load({"params/w": flat}, storage_reader=Reader(path, tag))``.

    Every tensor is flat; ``manifest.tensors[name].shape`` has its shape. What is read is checked, and nothing is unpickled.
    """

    folder: Path = attrs.field(converter=Path)
    tag: str
    place: Path = attrs.field(init=False)
    manifest: Manifest = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.place, self.manifest = open_manifest(self.folder, self.tag)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from load to load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in torch's words."""
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
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it could be a folder."""
        return Path(checkpoint_id).is_dir()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items, file by file from front to back; on the host and in the stored dtype, straight into their place."""
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
        wants: list[storage.Want] = []
        landed: list[tuple[ReadItem, Tensor, Tensor]] = []
        staged = 0
        for position, item in items:
            target = planner.resolve_tensor(item).detach()
            dtype = self.manifest.tensors[item.storage_index.fqn].dtype
            direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
            into = target if direct else torch.empty(target.shape, dtype=dtype)
            staged += 0 if direct else into.numel() * into.element_size()
            wants.append(storage.Want(position, into.reshape(-1).view(torch.uint8).numpy().data))
            landed.append((item, into, target))
            if staged > _STAGED:
                self._land(index, wants, landed, planner)
                wants, landed, staged = [], [], 0
        self._land(index, wants, landed, planner)

    def _land(
        self, index: int, wants: list[storage.Want], landed: list[tuple[ReadItem, Tensor, Tensor]], planner: LoadPlanner
    ) -> None:
        storage.read(self.place, self.manifest.files[index], wants)
        for item, into, target in landed:
            if into is not target:
                target.copy_(into)
            planner.commit_tensor(item, target)


@attrs.frozen(eq=False)
class Spread:
    """A global tensor of ``numel`` elements, flat, and the stretches of it that this rank has: by their offsets, flat, too.

    It is checkpointable in torch's sense. Flat, because a rank's shards are stretches of flattened leaves: whatever ranks,
    stages and units there were and are, what must be read is where stretches overlap.
    """

    numel: int
    stretches: tuple[tuple[int, Tensor], ...]

    def size(self) -> torch.Size:
        """The global tensor's."""
        return torch.Size([self.numel])

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [write_item(fqn, self.numel, offset, view.numel(), view.dtype) for offset, view in self.stretches]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk(offset, view.numel()) for offset, view in self.stretches]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.index is not None and index.index < len(self.stretches):
            offset, view = self.stretches[index.index]
            if index.offset == torch.Size([offset]):
                return view
        for offset, view in self.stretches:  # the index is a hint
            if index.offset == torch.Size([offset]):
                return view
        raise KeyError(f"{index.fqn}: this rank has no stretch at {index.offset}")


def chunk(offset: int, numel: int) -> ChunkStorageMetadata:
    """A stretch as torch describes it."""
    return ChunkStorageMetadata(torch.Size([offset]), torch.Size([numel]))


def write_item(name: str, total: int, offset: int, numel: int, dtype: torch.dtype) -> WriteItem:
    """A stretch that is to be written, as torch describes it."""
    return WriteItem(
        index=MetadataIndex(name, [offset]),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk(offset, numel), TensorProperties(dtype), torch.Size([total])),
    )
