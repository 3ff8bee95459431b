"""Whole leaves for optimizers that need them: each is put together on one rank, and what is made of it goes back."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from . import comm
from .parts import Parts, Piece

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

    parts: Parts
    of: tuple[int, ...]

    @staticmethod
    def choose(parts: Parts) -> "Owners":
        """The same on every rank.

        >>> from functional_ds import Layout
        >>> layout = Layout.of({"a": torch.ones(8), "b": torch.ones(8)}, 2)
        >>> comm.simulate(lambda: Owners.choose(Parts.of_layout(layout, comm.world())).of, world_size=2)
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

    def whole(self, pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """From this rank's pieces to the leaves that it owns, flat."""
        mine, parts = self.parts.rank, self.parts
        order = self._by_owner(parts.pieces)
        arrives = [[p for p in there if self.of[p.leaf] == mine] for there in parts.ranks]
        flat = self._exchange([pieces[i] for block in order for i in block], self._sent(), [_total(block) for block in arrives])
        leaves = {i: flat.new_empty(leaf.numel) for i, leaf in enumerate(parts.leaves) if self.of[i] == mine}
        for piece, part in _cut(flat, [piece for block in arrives for piece in block]):
            leaves[piece.leaf][piece.offset : piece.offset + piece.numel] = part
        return leaves

    def back(self, leaves: Mapping[int, Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """From the leaves that this rank owns, flat, to its pieces; ``like`` are such pieces."""
        parts, mine = self.parts, self.parts.rank
        leaves_of = [[p for p in there if self.of[p.leaf] == mine] for there in parts.ranks]
        sent = [leaves[p.leaf][p.offset : p.offset + p.numel] for block in leaves_of for p in block]
        flat = self._exchange(sent or [like[0][:0]] if like else sent, [_total(block) for block in leaves_of], self._sent())
        order = [i for block in self._by_owner(parts.pieces) for i in block]
        found = dict(zip(order, (part for _, part in _cut(flat, [parts.pieces[i] for i in order])), strict=True))
        return [found[i] for i in range(len(order))]

    def _by_owner(self, pieces: Sequence[Piece]) -> list[list[int]]:
        blocks: list[list[int]] = [[] for _ in self.parts.ranks]
        for i, piece in enumerate(pieces):
            blocks[self.of[piece.leaf]].append(i)
        return blocks

    def _sent(self) -> list[int]:
        return [_total([self.parts.pieces[i] for i in block]) for block in self._by_owner(self.parts.pieces)]

    def _exchange(self, blocks: list[Tensor], sends: list[int], receives: list[int]) -> Tensor:
        flat = torch.cat(blocks)
        if all(self.of[piece.leaf] == rank for rank, pieces in enumerate(self.parts.ranks) for piece in pieces):
            return flat
        found: Tensor = comm.all_to_all(flat, self.parts.group, input_splits=sends, output_splits=receives)
        return found


def _total(pieces: Sequence[Piece]) -> int:
    return sum(piece.numel for piece in pieces)


def _cut(flat: Tensor, pieces: Sequence[Piece]) -> list[tuple[Piece, Tensor]]:
    return list(zip(pieces, flat.split([piece.numel for piece in pieces]), strict=True))
