"""Stretches of a flattened global tensor, as ``torch.distributed.checkpoint`` understands them."""

from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["Spread", "write_item"]


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
