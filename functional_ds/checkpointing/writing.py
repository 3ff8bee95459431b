"""A division of labour as torch's plans, and this rank's part of it as bytes."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from .describing import Held
from .dividing import Offer, Share
from .manifest import DTYPES, Chunk, Stored
from .spread import Spread, write_item

__all__ = ["Image", "Planner", "stored_tensors"]

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
