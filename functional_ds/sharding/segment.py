"""Units, their flat tensors (segments), and the position of each leaf in them (slots)."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, pairwise

import attrs
import torch
from torch import Tensor

from functional_ds.base.marks import like_marked
from functional_ds.comm.backends.pool import Pool

from .leaf_slice import LeafSlice

Blocks = tuple[tuple[int, ...], ...]


@attrs.frozen
class Slot:
    """The position of a leaf in its segment.

    Attributes:
        leaf: the leaf's index in the tree.
        offset: its first element in the flat tensor.
        shape: its shape.
        numel: its number of elements.
        slices: this rank's slice of the whole leaf; ranks with the same layout may have other slices.
    """

    leaf: int
    offset: int
    shape: tuple[int, ...]
    numel: int
    slices: tuple[LeafSlice, ...] = attrs.field(default=(), repr=False)


@attrs.frozen
class Segment:
    """A flat tensor of leaves of one unit and dtype, with equal marks.

    Attributes:
        unit: the index of the unit.
        dtype: the leaves' dtype.
        trainable: whether they are trained.
        slots: the positions of the leaves.
        shard: the number of elements of a rank's shard, or of the owner's.
        size: the number of elements of the flat tensor: n shards, or ``shard`` if a rank owns the segment.
        owner: the rank that has the whole segment, or its index in each block; None if all ranks have a shard.
        persistent: whether the params stay whole on all ranks in stage 3, which gathers others on first use.
        sharers: blocks of ranks, if leaves are shared within blocks only; the ranks of a block have the segment's shards, in
            order. None if all ranks share it.
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
        """Whether no two ranks share it, so that it is neither gathered nor reduced."""
        return self.sharers is not None and len(self.sharers[0]) == 1

    def place(self, rank: int) -> int:
        """The index of a rank's shard."""
        return rank if self.sharers is None else next(block.index(rank) for block in self.sharers if rank in block)

    def holders(self, place: int) -> tuple[int, ...]:
        """The ranks that have a shard, one in each block."""
        return (place,) if self.sharers is None else tuple(block[place] for block in self.sharers)

    def cut(self, rank: int) -> tuple[int, int]:
        """The start and stop of a rank's shard in the flat tensor."""
        return self.bounds(self.place(rank))

    def bounds(self, place: int) -> tuple[int, int]:
        """The start and stop of a shard in the flat tensor."""
        if self.owner is None:
            return place * self.shard, (place + 1) * self.shard
        return (0, self.size) if place == self.owner else (0, 0)

    def own(self, flat: Tensor, rank: int) -> Tensor:
        """A rank's shard, as a view of the flat tensor."""
        start, stop = self.cut(rank)
        return like_marked(flat.detach()[start:stop], flat)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The leaves, as views of the flat tensor."""
        if type(flat) is not Tensor or not flat.is_contiguous():
            return [flat[s.offset : s.offset + s.numel].view(s.shape) for s in self.slots]
        start = flat.storage_offset()  # one operation per leaf; a slice and a view would take two
        return [torch.as_strided(flat, shape, strides, start + offset) for shape, strides, offset in self._strided]

    def packed(
        self, leaves: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device, pool: Pool | None = None
    ) -> Tensor | None:
        """The inverse of ``views``: copies leaves to a new flat tensor, from the pool if given, with zeros as padding.

        None unless these are all of the segment's leaves, contiguous, of the dtype and on the device.
        """
        if len(leaves) < len(self.slots):
            return None
        parts: list[Tensor] = []
        nothing = torch.zeros(max(self.gaps), dtype=dtype, device=device) if any(self.gaps) else None
        for leaf, gap in zip(leaves, self.gaps, strict=True):
            if leaf is None or leaf.dtype != dtype or leaf.device != device or not leaf.is_contiguous():
                return None
            parts.append(leaf if leaf.dim() == 1 else leaf.view(-1))
            if gap and nothing is not None:
                parts.append(nothing[:gap])
        room = None if pool is None or torch.is_grad_enabled() else pool.take(self.size, dtype, device)
        return torch.cat(parts) if room is None else torch.cat(parts, out=room)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The leaves' indices in the tree."""
        return tuple(slot.leaf for slot in self.slots)

    @cached_property
    def _strided(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Each leaf's shape, strides and offset."""
        return tuple((s.shape, torch.empty(s.shape, device="meta").stride(), s.offset) for s in self.slots)

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """The number of padding elements after each leaf."""
        starts = chain((slot.offset for slot in self.slots), (self.size,))
        return tuple(stop - start - slot.numel for slot, (start, stop) in zip(self.slots, pairwise(starts), strict=True))


@attrs.frozen
class Unit:
    """Leaves that are gathered as one.

    Attributes:
        name: its name.
        segments: the indices of its segments.
        trained_segments: the indices of those that get gradients.
        trained_leaves: the leaves of these segments.
    """

    name: str
    segments: tuple[int, ...]
    trained_segments: tuple[int, ...] = attrs.field(repr=False)
    trained_leaves: tuple[int, ...] = attrs.field(repr=False)

    @staticmethod
    def of(name: str, segments: Sequence[Segment], first: int) -> "Unit":
        """The unit of consecutive segments, the first of which has the index ``first``."""
        trained = [(index, segment) for index, segment in enumerate(segments, first) if segment.trainable]
        leaves = tuple(chain.from_iterable(segment.leaves for _, segment in trained))
        return Unit(name, tuple(range(first, first + len(segments))), tuple(index for index, _ in trained), leaves)
