"""Checks, in the first step, that only attention depends on the order of a rank's positions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .batch_cut import CutBatch


def in_other_orders(piece: CutBatch, dims: Mapping[str, int]) -> tuple[CutBatch, CutBatch]:
    """This rank's piece twice, in two orders of its tokens; a single token stays, as other ranks may have more.

    A correct model gives each token the same result in both, up to rounding: tokens move with their labels and
    ``position_ids``, and attention does not see the move. Each token attends to itself, and in every four neighbours the second
    to the first and the fourth to the third. The second batch swaps the middle two of the four, so code that counts positions
    itself, or mixes neighbours, gives another result.

    Args:
        piece: of the batch.
        dims: of the leaves that were split, by path.
    """
    axis = piece.axis
    ranks, layout = axis.group.size, axis.layout
    held = layout.order(axis.length, ranks).view(ranks, -1)  # [ranks, positions of each]
    size = held.shape[1]
    fours = size // 4 * 4
    order = torch.arange(size)
    order = order[:fours].view(-1, 4)[:, [0, 2, 1, 3]].flatten() if fours else order.flip(0)
    order = torch.cat([order, torch.arange(len(order), size)])
    numbers = held.clone()
    if fours and layout.documents is None:  # no document ends between them
        four = numbers[:, :fours].view(ranks, -1, 4)  # a view
        pairs = four.index_select(2, torch.tensor([0, 0, 2, 2]))
        near = (four.diff(dim=2) == 1).all(2, keepdim=True)  # not so far apart that a window ends between them
        numbers[:, :fours] = torch.where(near, pairs, four).view(ranks, -1)

    def whole(by_rank: Tensor, like: Tensor | None) -> Tensor:
        by_position = torch.empty(1, axis.length, dtype=torch.int64)
        by_position[0, held.flatten()] = by_rank.flatten()
        device = next(leaf.device for leaf in tree.leaves(piece.batch) if isinstance(leaf, Tensor))
        return by_position.to(device) if like is None else by_position.to(device).where(like >= 0, -1)

    def at(documents: Tensor | None) -> Tensor | None:
        """The documents with the tokens in their new places."""
        if documents is None:
            return None
        places = torch.empty(axis.length, dtype=torch.int64)
        places[held.flatten()] = held[:, order].flatten()
        return documents.index_select(1, places.to(documents.device))

    return (
        CutBatch(piece.batch, whole(numbers, piece.documents), axis),
        CutBatch(_moved(piece.batch, dims, order), whole(numbers[:, order], at(piece.documents)), axis),
    )


def _moved(batch: Any, dims: Mapping[str, int], order: Tensor) -> Any:
    """The batch with this rank's positions in another order."""

    def moved(path: str, leaf: Any) -> Any:
        dim = dims.get(path, 1 if path == "position_ids" else None)
        return leaf if dim is None else leaf.index_select(dim, order.to(leaf.device))

    return tree.unflatten(tree.structure(batch), [moved(path, leaf) for path, leaf in tree.named(batch)])


def in_halves(piece: CutBatch, dims: Mapping[str, int]) -> tuple[CutBatch, CutBatch, CutBatch]:
    """This rank's piece, its first half twice, and its second half twice, where each token attends only to itself.

    For a sum over tokens, the first is the mean of the other two. A single token stays in all three.

    Args:
        piece: of the batch.
        dims: of the leaves that were split, by path.
    """
    axis = piece.axis
    held = axis.layout.order(axis.length, axis.group.size).view(axis.group.size, -1)
    size, half = held.shape[1], held.shape[1] // 2
    every = torch.arange(size)

    def of(order: Tensor) -> CutBatch:
        numbers, places = torch.empty(1, axis.length, dtype=torch.int64), torch.empty(axis.length, dtype=torch.int64)
        numbers[0, held.flatten()], places[held.flatten()] = held.flatten(), held[:, order].flatten()
        if piece.documents is not None:
            given = piece.documents.index_select(1, places.to(piece.documents.device))
            numbers = numbers.to(given.device).where(given >= 0, -1)
        device = next(leaf.device for leaf in tree.leaves(piece.batch) if isinstance(leaf, Tensor))
        return CutBatch(_moved(piece.batch, dims, order), numbers.to(device), axis)

    a, b, rest = every[:half], every[half : 2 * half], every[2 * half :]
    return of(every), of(torch.cat([a, a, rest])), of(torch.cat([b, b, rest]))


def has_zeros(step: Step, state: State) -> bool:
    """Whether this rank's part of some matrix is zeros."""
    leaf_map = step.leaf_map(state)
    parts = zip(leaf_map.shards, leaf_map.views(step.trained(state)), strict=True)
    return any(len(leaf_map.leaves[part.leaf].shape) > 1 and part.numel and not view.any() for part, view in parts)
