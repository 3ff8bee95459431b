"""Where the leaves of a unit lie: flat tensors, and the place of each leaf in its own."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, pairwise

import attrs
import torch
from torch import Tensor

from functional_ds.base.marks import like_marked
from functional_ds.comm.backends.pool import Pool

from .leaf_slice import LeafSlice

__all__ = ["Blocks", "Segment", "Slot", "Unit"]

Blocks = tuple[tuple[int, ...], ...]


@attrs.frozen
class Slot:
    """The place of a leaf in its segment.

    Attributes:
        leaf: the leaf's index in the tree.
        offset: where it begins in the flat tensor.
        shape: its shape.
        numel: its number of elements.
        slices: what this rank's leaf is of a whole one; ranks that share the layout may have other slices.
    """

    leaf: int
    offset: int
    shape: tuple[int, ...]
    numel: int
    slices: tuple[LeafSlice, ...] = attrs.field(default=(), repr=False)


@attrs.frozen
class Segment:
    """Leaves of one unit and dtype, with equal marks, in one flat tensor.

    Attributes:
        unit: the index of the unit.
        dtype: the leaves' dtype.
        trainable: whether they are trained.
        slots: their places.
        shard: the elements of a rank's shard; if one rank owns the segment, of that rank's.
        size: the elements of the flat tensor: ``n * shard``, or ``shard`` if one rank owns the segment.
        owner: the rank that has the whole segment, or its place in each block; None if every rank has a shard.
        persistent: whether its params stay whole on every rank in stage 3, which gathers others at first touch.
        sharers: where the leaves are the same on some of the n ranks alone: all ranks in blocks, those of a block share a
            segment and have its shards in their order. None where all ranks share it.
    """

    unit: int
    dtype: torch.dtype
    trainable: bool
    slots: tuple[Slot, ...]
    shard: int
    size: int
    owner: int | None = None
    persistent: bool = False
    sharers: Blocks | None = None

    @property
    def alone(self) -> bool:
        """Whether no two ranks share it, so that there is nothing to gather or to reduce."""
        return self.sharers is not None and len(self.sharers[0]) == 1

    def place(self, rank: int) -> int:
        """Which of the shards rank ``rank`` has."""
        return rank if self.sharers is None else next(block.index(rank) for block in self.sharers if rank in block)

    def holders(self, place: int) -> tuple[int, ...]:
        """The ranks that have this shard: one in each block."""
        return (place,) if self.sharers is None else tuple(block[place] for block in self.sharers)

    def cut(self, rank: int) -> tuple[int, int]:
        """The start and stop of rank ``rank``'s shard in the flat tensor."""
        return self.bounds(self.place(rank))

    def bounds(self, place: int) -> tuple[int, int]:
        """The start and stop of a shard in the flat tensor."""
        if self.owner is None:
            return place * self.shard, (place + 1) * self.shard
        return (0, self.size) if place == self.owner else (0, 0)

    def own(self, flat: Tensor, rank: int) -> Tensor:
        """Rank ``rank``'s shard, as a view of the flat tensor."""
        start, stop = self.cut(rank)
        return like_marked(flat.detach()[start:stop], flat)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The leaves, as views of the flat tensor."""
        if type(flat) is not Tensor or not flat.is_contiguous():
            return [flat[s.offset : s.offset + s.numel].view(s.shape) for s in self.slots]
        start = flat.storage_offset()  # one operation a leaf, where a slice and a view take two
        return [torch.as_strided(flat, shape, strides, start + offset) for shape, strides, offset in self._strided]

    def packed(
        self, leaves: Sequence[Tensor], dtype: torch.dtype, device: torch.device, pool: Pool | None = None
    ) -> Tensor | None:
        """The inverse of ``views``: leaves in a new flat tensor, perhaps the pool's, zero between them, by one operation.

        None unless these are all of the segment's leaves, contiguous, of the dtype and on the device.
        """
        if len(leaves) < len(self.slots):
            return None
        parts: list[Tensor] = []
        nothing = torch.zeros(max(self.gaps), dtype=dtype, device=device) if any(self.gaps) else None
        for leaf, gap in zip(leaves, self.gaps, strict=True):
            if leaf.dtype != dtype or leaf.device != device or not leaf.is_contiguous():
                return None
            parts.append(leaf.view(-1))
            if gap and nothing is not None:
                parts.append(nothing[:gap])
        room = None if pool is None or torch.is_grad_enabled() else pool.take(self.size, dtype, device)
        return torch.cat(parts) if room is None else torch.cat(parts, out=room)

    @cached_property
    def _strided(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Each leaf's shape, strides and offset."""
        return tuple((s.shape, torch.empty(s.shape, device="meta").stride(), s.offset) for s in self.slots)

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """How many elements of the flat tensor after each leaf are none's."""
        starts = chain((slot.offset for slot in self.slots), (self.size,))
        return tuple(stop - start - slot.numel for slot, (start, stop) in zip(self.slots, pairwise(starts), strict=True))


@attrs.frozen
class Unit:
    """Leaves that are gathered as one.

    Attributes:
        name: of the unit.
        segments: the indices of its segments.
        trained_segments: which of these get gradients.
        trained_leaves: the leaves of these segments.
    """

    name: str
    segments: tuple[int, ...]
    trained_segments: tuple[int, ...] = attrs.field(repr=False)
    trained_leaves: tuple[int, ...] = attrs.field(repr=False)

    @staticmethod
    def of(name: str, segments: Sequence[Segment], first: int) -> "Unit":
        """The unit of some segments, the first of which has the index ``first``."""
        trained = [(index, segment) for index, segment in enumerate(segments, first) if segment.trainable]
        leaves = tuple(slot.leaf for _, segment in trained for slot in segment.slots)
        return Unit(name, tuple(range(first, first + len(segments))), tuple(index for index, _ in trained), leaves)
