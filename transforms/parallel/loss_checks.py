"""The checks of a first step over sequences: only attention depends on the order of tokens, and the loss is a sum over them."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.comm.worlds.rng_state import RngState
from functional_ds.step.axes import IN_ORDER
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .batch_cut import CutBatch
from .wide_sums import WideSums

HALF = "a loss in half precision"  # noted where the loss function returned one
ZEROS = "a matrix of zeros"  # noted if a matrix is zeros at first, which hides the layers before it
_SUMMED_WIDE = "a loss whose checks sum in fp32"  # noted on all ranks
_IN_HALF = ". A loss whose sums over tokens are in half precision cannot be compared so closely: sum in fp32"


def check_order(
    what: str, step: Step, state: State, piece: CutBatch, dims: Mapping[str, int], closer: Callable[[], None]
) -> None:
    """Raises an error for a loss that depends on the order of positions outside attention; two forward passes.

    Args:
        what: the transform, for the error.
        step: whose loss it is.
        state: before the step.
        piece: of the batch.
        dims: of the leaves that were split, by path.
        closer: called on all ranks before the error; it may raise one that is closer to the cause.

    Raises:
        ValueError: on all ranks.
    """
    two = in_other_orders(piece, dims)
    for wide in _precisions(state):
        (one, other), eps = _losses(step, state, two, wide)
        slack = max(1e-5, 2 * eps) * one.sum.abs() + max(3e-7, eps) * one.weight
        numbers = [(one.sum - other.sum).abs(), one.sum.abs(), slack, has_zeros(step, state)]
        change, size, slack, zeros = _over_ranks(step, state, numbers)
        if zeros:
            state.graphs.is_new(ZEROS)
        if IN_ORDER in state.graphs.kinds or (not change > slack and (wide or _SUMMED_WIDE not in state.graphs.kinds)):
            return
    closer()
    raise ValueError(
        f"{what}: where tokens change their places within a rank, each with its label and position, the loss changes "
        f"by {change:.2g} of {size:.6g}, though attention is kept out of it. So something else acts along the "
        "sequence, and would see each rank's piece alone: positions that the model counts itself (pass it the batch's "
        "position_ids), labels that are shifted in the loss, a convolution or a recurrence (linear attention, state "
        "space). Such models cannot be split along the sequence, unless that layer exchanges its pieces itself and asks "
        f"for the ranks by axis('sp'){_IN_HALF}"
    )


def check_sum(
    what: str, step: Step, state: State, piece: CutBatch, dims: Mapping[str, int], closer: Callable[[], None]
) -> None:
    """Raises an error for a loss that is not a sum over a rank's tokens, unless it reduces over ranks; three passes.

    Its arguments are those of ``check_order``.

    Raises:
        ValueError: on all ranks.
    """
    group = piece.axis.group
    three = in_halves(piece, dims)
    for wide in _precisions(state):
        with comm.ledger() as book:
            losses, eps = _losses(step, state, three, wide)
        whole, first, second = (loss.sum for loss in losses)
        change, size = (first + second - 2 * whole).abs(), first.abs() + second.abs() + 2 * whole.abs()
        slack = max(1e-5, 4 * torch.finfo(whole.dtype).eps, 2 * eps) * size
        roles = {row.traffic.role for row in book.rows if set(group.ranks) <= set(row.ranks) and "/" not in row.group}
        numbers = [(change - slack).clamp(min=0), change, size, not roles <= {"exchange", "gather"}]
        over, by, of, reduces = _over_ranks(step, state, numbers)
        if reduces or not over > 0 or IN_ORDER in state.graphs.kinds:
            return
    closer()
    raise ValueError(
        f"{what}: the loss is not a sum over tokens: with half of a rank's tokens twice, and with the other half twice, "
        f"it adds up to {by:.2g} of {of:.6g} more or less than twice the loss of all. A mean over positions, a "
        "preference loss, or a balance loss of a rank's own tokens would differ on each number of ranks: sum over the "
        f"ranks what goes into it, by comm.all_reduce over the group of axis('sp'){_IN_HALF}"
    )


def _precisions(state: State) -> tuple[bool, ...]:
    """Whether to sum in fp32 in each try of a check: what a sum in half precision refuses is compared again in fp32."""
    return (True,) if _SUMMED_WIDE in state.graphs.kinds else (False, True)


def _losses(step: Step, state: State, pieces: Any, wide: bool) -> tuple[list[Weighted], float]:
    """The losses of pieces, summed in fp32 if ``wide``, and the epsilon of what was reduced in half precision still."""
    before, sums = RngState.now(), WideSums()
    try:
        with sums if wide else nullcontext():
            losses = [step.phases["measure"](step, state, piece)["loss"] for piece in pieces]
    finally:
        before.restore()
    return losses, sums.eps


def _over_ranks(step: Step, state: State, values: list[Any]) -> list[float]:
    """The sums of numbers over the ranks, which agree on what some of them has noted of the loss: of a stage, say."""
    notes = {IN_ORDER: IN_ORDER, HALF: _SUMMED_WIDE}  # what a rank has noted, and what all note then
    device, here = state.step.device, [note in state.graphs.kinds for note in notes]
    numbers = [torch.as_tensor(value, device=device, dtype=torch.float64) for value in (*values, *here)]
    sums: list[float] = step.sum_over_ranks(state, torch.stack(numbers)).tolist()
    for count, note in zip(sums[len(values) :], notes.values(), strict=True):
        if count:
            state.graphs.is_new(note)
    return sums[: len(values)]


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

    return _reordered(piece, dims, held, torch.arange(size), numbers), _reordered(piece, dims, held, order, numbers[:, order])


def _reordered(piece: CutBatch, dims: Mapping[str, int], held: Tensor, order: Tensor, numbers: Tensor) -> CutBatch:
    """The piece with this rank's tokens in another order, and documents of these numbers; padding stays in none.

    Args:
        piece: of the batch.
        dims: of the leaves that were split, by path.
        held: each rank's positions, [ranks, positions].
        order: of each rank's positions.
        numbers: the documents of the reordered positions, [ranks, positions].
    """
    axis, documents = piece.axis, piece.documents
    by_position, places = torch.empty(1, axis.length, dtype=torch.int64), torch.empty(axis.length, dtype=torch.int64)
    by_position[0, held.flatten()], places[held.flatten()] = numbers.flatten(), held[:, order].flatten()
    by_position = by_position.to(piece.device)
    if documents is not None:
        by_position = by_position.where(documents.index_select(1, places.to(documents.device)) >= 0, -1)
    return CutBatch(_moved(piece.batch, dims, order), by_position, axis)


def _moved(batch: Any, dims: Mapping[str, int], order: Tensor) -> Any:
    """The batch with this rank's positions in another order."""

    def moved(path: str, leaf: Any) -> Any:
        dim = dims.get(path, 1 if path == "position_ids" else None)
        return leaf if dim is None else leaf.index_select(dim, order.to(leaf.device))

    return tree.unflatten(tree.structure(batch), [moved(path, leaf) for path, leaf in tree.named(batch)])


def in_halves(piece: CutBatch, dims: Mapping[str, int]) -> tuple[CutBatch, ...]:
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
    a, b, rest = every[:half], every[half : 2 * half], every[2 * half :]
    orders = every, torch.cat([a, a, rest]), torch.cat([b, b, rest])
    return tuple(_reordered(piece, dims, held, order, held) for order in orders)


def has_zeros(step: Step, state: State) -> bool:
    """Whether this rank's part of some matrix is zeros."""
    leaf_map = step.leaf_map(state)
    parts = zip(leaf_map.shards, leaf_map.views(step.trained(state)), strict=True)
    return any(len(leaf_map.leaves[part.leaf].shape) > 1 and part.numel and not view.any() for part, view in parts)
