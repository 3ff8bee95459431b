"""Whole leaves for optimizers that need them: each is put together on one rank, and what is made of it goes back."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.sharding.leaf_map import LeafMap, LeafShard

__all__ = ["Owners"]


@attrs.frozen
class Owners:
    """Which rank owns which leaf.

    Law: ``back ∘ whole = id``: the pieces that ``back`` gives are those that ``whole`` was given.

    ``whole`` and ``back`` are an all-to-all each, by which every element travels once, but for those that the owner has
    already: in elements, over all ranks, Σ over leaves of (numel - the owner's piece) each way. Leaves that no shard's edge
    cuts are not sent; where there are no others, nothing is called.

    Attributes:
        parts: which elements are where.
        of: each leaf's owner: the rank with most of it, and of several such the one with least to own so far.
    """

    parts: LeafMap
    of: tuple[int, ...]

    @staticmethod
    def choose(parts: LeafMap) -> "Owners":
        """The same on every rank.

        >>> from functional_ds import Layout
        >>> layout = Layout.of({"a": torch.ones(8), "b": torch.ones(8)}, 2)
        >>> comm.simulate(lambda: Owners.choose(LeafMap.of_layout(layout, comm.world())).of, world_size=2)
        [(0, 1), (0, 1)]
        """
        held: list[dict[int, int]] = [{} for _ in parts.leaves]
        for rank, pieces in enumerate(parts.ranks):
            for piece in pieces:
                held[piece.leaf][rank] = piece.numel
        load = [0] * len(parts.ranks)
        of = []
        for leaf, shares in zip(parts.leaves, held, strict=True):
            owner = min(shares, key=lambda rank: (-shares[rank], load[rank], rank), default=0)
            load[owner] += leaf.numel
            of.append(owner)
        return Owners(parts, tuple(of))

    def whole(self, pieces: Sequence[Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        """From this rank's pieces, of one dtype on all ranks, to the leaves that it owns, flat."""
        order, arrives = self._by_owner(), self._mine()
        blocks = [pieces[i] for i in order]
        flat = self._exchange(blocks, self._outward(), [_total(block) for block in arrives], dtype)
        leaves = {i: flat.new_empty(leaf.numel) for i, leaf in enumerate(self.parts.leaves) if self.of[i] == self.parts.rank}
        there = [piece for block in arrives for piece in block]
        for piece, part in zip(there, flat.split([piece.numel for piece in there]), strict=True):
            leaves[piece.leaf][piece.offset : piece.offset + piece.numel] = part
        return leaves

    def back(self, leaves: Mapping[int, Tensor], dtype: torch.dtype) -> list[Tensor]:
        """From the leaves that this rank owns, flat, to its pieces."""
        order, leaving = self._by_owner(), self._mine()
        blocks = [leaves[p.leaf][p.offset : p.offset + p.numel] for block in leaving for p in block]
        flat = self._exchange(blocks, [_total(block) for block in leaving], self._outward(), dtype)
        found = zip(order, flat.split([self.parts.pieces[i].numel for i in order]), strict=True)
        return [part for _, part in sorted(found, key=lambda pair: pair[0])]

    def _by_owner(self) -> list[int]:
        """This rank's pieces in the order of their owners."""
        return sorted(range(len(self.parts.pieces)), key=lambda i: self.of[self.parts.pieces[i].leaf])

    def _outward(self) -> list[int]:
        """How many elements of this rank's pieces each rank owns."""
        pieces = self.parts.pieces
        return [_total([p for p in pieces if self.of[p.leaf] == rank]) for rank in range(len(self.parts.ranks))]

    def _mine(self) -> list[list[LeafShard]]:
        """Each rank's pieces of the leaves that this rank owns."""
        return [[p for p in pieces if self.of[p.leaf] == self.parts.rank] for pieces in self.parts.ranks]

    def _exchange(self, blocks: list[Tensor], sends: list[int], receives: list[int], dtype: torch.dtype) -> Tensor:
        group = self.parts.group
        device = group.world.device if group is not None else None
        flat = torch.cat(blocks) if blocks else torch.empty(0, dtype=dtype, device=device)
        if group is None or all(self.of[p.leaf] == rank for rank, pieces in enumerate(self.parts.ranks) for p in pieces):
            return flat
        found: Tensor = comm.all_to_all(flat, group, input_splits=sends, output_splits=receives)
        return found


def _total(pieces: Sequence[LeafShard]) -> int:
    return sum(piece.numel for piece in pieces)
