"""The checks of a first step over sequences: only attention depends on the order of tokens, and the loss is a sum over them."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from functional_ds import comm
from functional_ds.base.weighted import Weighted
from functional_ds.comm.worlds.rng_state import RngState
from functional_ds.step.axes import IN_ORDER
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .batch_cut import CutBatch
from .order_check import has_zeros, in_halves, in_other_orders
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
