"""Attention with gathered keys and values: each rank has all keys, and its own queries."""

from collections.abc import Callable, Sequence

from torch import Tensor

from functional_ds import comm
from functional_ds.comm.record.group import Group

from .axis import resolve_axis
from .blockwise import Keys, blockwise, check_heads, mask_of
from .sequence_layout import SequenceLayout

__all__ = ["gathered"]

Attention = Callable[..., Tensor]


def gathered(group: Group | None = None, *, layout: SequenceLayout | str | None = None) -> Attention:
    """Attention of sequences that are cut among ranks, each of which gathers all keys and values.

    Law: as ``ring``'s, with the same arguments. It takes one collective where a ring takes P - 1 messages, and memory for all
    keys and values. Nothing is computed while they travel.

    Args:
        group: the ranks; None for those of the step's ``T.sequence``, with its layout and documents.
        layout: which positions each of them holds, or its name; "contiguous" by default.

    Raises:
        ValueError: no group and no step that has one; shapes, dtypes, documents or layout do not fit.

    Cost: one all-gather of 2 g d N/P elements forward, which sends 2 g d N (P - 1)/P, and its reduce-scatter backward. 2 g d N
    elements a row stay until the backward pass.

    Source: the context parallelism of Llama 3 (arXiv 2407.21783).

    >>> import torch
    >>> from functional_ds import comm
    >>> x = torch.randn(1, 4, 4, 16)
    >>> comm.simulate(lambda: gathered(comm.world())(x, x, x, causal=True).shape, world_size=2)
    [torch.Size([1, 4, 4, 16]), torch.Size([1, 4, 4, 16])]
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: int | None = None,
        documents: Tensor | Sequence[int] | None = None,
        scale: float | None = None,
    ) -> Tensor:
        ranks, how, numbers = resolve_axis("gathered attention", group, layout, documents=documents)
        check_heads("gathered attention", q, k, v)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"gathered attention: {q.shape[2]} queries and {k.shape[2]} keys: a rank holds the same positions of both"
            )
        length = q.shape[2] * ranks.size
        runs = how.runs(length, ranks.size, ranks.rank)
        mask = mask_of(causal, window, numbers if documents is None else documents, length=length, rows=q.shape[0], layout=how)
        k, v = comm.all_gather((k, v), ranks, dim=2)
        cols: tuple[range, ...] = (range(length),)
        if how.kind == "striped":  # queries of a stripe see stripes of keys in squares
            cols = tuple(run for rank in range(ranks.size) for run in how.runs(length, ranks.size, rank))
        elif how != SequenceLayout("contiguous"):
            order = how.inverse(length, ranks.size, device=k.device)
            k, v = k.index_select(2, order), v.index_select(2, order)
        return blockwise(q, Keys(k, v, cols), rows=runs, mask=mask, scale=scale)

    return attend
