"""Attention with all-gathered keys and values: each rank has all keys, and its own queries."""

from torch import Tensor

from functional_ds import comm
from functional_ds.comm.record.group import Group

from .blockwise import Keys, blockwise
from .cut_attention import Attention, CutSequence, cut_attention
from .sequence_layout import SequenceLayout


def gathered(group: Group | None = None, *, layout: SequenceLayout | str | None = None) -> Attention:
    """All-gather attention over sequences split over ranks, each of which gathers all keys and values.

    Law: as for ``ring``, with the same arguments. It takes one collective instead of P - 1 messages, and memory for all keys
    and values. Communication does not overlap computation.

    Args:
        group: the ranks; None for those of the step's ``T.sequence``, with its layout and documents.
        layout: which positions each of them holds, or its name; "contiguous" by default.

    Raises:
        ValueError: no group and no step that has one; shapes, dtypes, documents or layout do not match.

    Cost: one all-gather forward, which sends 2 g d N (P - 1)/P elements, and its reduce-scatter backward. 2 g d N elements a
    row stay in memory until the backward pass.

    Source: the context parallelism of Llama 3 (arXiv 2407.21783).

    >>> import torch
    >>> from functional_ds import comm
    >>> x = torch.randn(1, 4, 4, 16)
    >>> comm.simulate(lambda: gathered(comm.world())(x, x, x, causal=True).shape, world_size=2)
    [torch.Size([1, 4, 4, 16]), torch.Size([1, 4, 4, 16])]
    """

    def compute(whole: CutSequence, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks, how, length = whole.group, whole.layout, whole.length
        k, v = comm.all_gather((k, v), ranks, dim=2)
        cols: tuple[range, ...] = (range(length),)
        if how.kind == "striped":  # queries of a stripe see stripes of keys in squares
            cols = tuple(run for rank in range(ranks.size) for run in how.runs(length, ranks.size, rank))
        elif how != SequenceLayout("contiguous"):
            order = how.inverse(length, ranks.size, device=k.device)
            k, v = k.index_select(2, order), v.index_select(2, order)
        return blockwise(q, Keys(k, v, cols), rows=whole.runs(), mask=whole.mask, scale=whole.scale)

    return cut_attention("gathered attention", compute, group=group, layout=layout)
