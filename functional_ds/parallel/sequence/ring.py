"""Ring attention: keys and values are passed around the ranks while each computes with those that it has."""

from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Pending
from functional_ds.comm.table.permutation import Permutation

from .blockwise import Keys, Partial, Queries, Total, empty_to_infinite
from .cut_attention import Attention, CutSequence, cut_attention
from .sequence_layout import SequenceLayout

_shift = lru_cache(maxsize=256)(Permutation.shift)


@attrs.frozen(eq=False)
class _Ring:
    """What the steps of a ring share: the ranks, their positions, and the shapes of a message.

    In step t, rank r computes with the keys of rank r - t. One message has keys and values, one has the gradients by them.
    """

    whole: CutSequence
    k_shape: torch.Size
    v_shape: torch.Size

    @property
    def group(self) -> Group:
        return self.whole.group

    def queries(self, q: Tensor) -> Queries:
        return Queries(q, self.whole.runs(), self.whole.mask, self.whole.scale)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Keys and values in a message, as views."""
        k, v = flat.split([self.k_shape.numel(), self.v_shape.numel()])
        return [k.view(self.k_shape), v.view(self.v_shape)]

    def keys(self, flat: Tensor, step: int) -> Keys:
        k, v = self.split(flat)
        return Keys(k, v, self.whole.runs(-step))

    def pass_on(self, flat: Tensor, by: int) -> Pending[Tensor]:
        """Starts a message to the next rank, or the previous one; the result is the other neighbour's."""
        return comm.start(comm.permute, flat, _shift(self.group.size, by), self.group)


class _RingAttention(torch.autograd.Function):
    """The forward sends n - 1 messages. The backward sends n - 1 of gradients, and keys again if they were not saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, here: _Ring, save: bool) -> Tensor:
        local_block = k.new_empty(k.numel() + v.numel())
        for view, x in zip(here.split(local_block), (k, v), strict=True):
            view.copy_(x)
        queries, blocks = here.queries(q), [local_block]
        so_far: Partial | None = None

        def step(number: int) -> None:
            nonlocal so_far
            coming = here.pass_on(blocks[-1], 1)
            so_far = queries.add(here.keys(blocks[-1], number), so_far)
            blocks.append(coming.wait())
            if not save:
                del blocks[0]

        comm.repeat(here.group.size - 1, step, here.group)
        wide, lse = queries.add(here.keys(blocks[-1], here.group.size - 1), so_far)
        o = wide.to(q.dtype)
        ctx.here = here
        ctx.save_for_backward(q, o, lse, *(blocks if save else [local_block]))
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        here: _Ring = ctx.here
        q, o, lse, local_block, *saved = ctx.saved_tensors
        n, queries, lse = here.group.size, here.queries(q), empty_to_infinite(lse)
        d_q = Total(torch.empty_like(q, dtype=lse.dtype))

        def gradients(flat: Tensor, number: int) -> Tensor:
            d_flat = torch.empty_like(flat, dtype=lse.dtype)
            d_keys = [Total(view) for view in here.split(d_flat)]
            queries.add_gradients(here.keys(flat, number), grad, o, lse, into=[d_q, *d_keys])
            for total in d_keys:
                total.sum()
            return d_flat

        # In reverse: the last block is the first here and goes back; its gradient goes with it and ends at its own rank.
        coming = [] if saved or n == 1 else [here.pass_on(local_block, -1)]
        d_own = gradients(local_block, 0)
        d_coming: list[Pending[Tensor]] = []

        def step(number: int, *, last: bool = False) -> None:
            place = n - 1 - number
            flat = coming.pop().wait() if coming else saved[min(place, len(saved)) - 1]  # one alone where shapes are counted
            if not (last or saved):
                coming.append(here.pass_on(flat, -1))
            d_flat = gradients(flat, place)
            if d_coming:
                d_flat += d_coming.pop().wait()
            d_coming.append(here.pass_on(d_flat, -1))

        if n > 1:
            comm.repeat(n - 2, step, here.group)
            step(n - 2, last=True)
            d_own += d_coming.pop().wait()
        d_k, d_v = here.split(d_own.to(local_block.dtype))
        return d_q.sum().to(q.dtype), d_k, d_v, None, None


def ring(group: Group | None = None, *, layout: SequenceLayout | str | None = None, save_blocks: bool = False) -> Attention:
    """Ring attention over sequences split over ranks: keys and values are passed around the ranks.

    Law: on each rank, value and gradients are its part of attention to the whole sequence, for every layout and mask. Each rank
    passes q, k and v of its positions, in the layout's order.

    The function takes q [rows, h, N/P, d], k [rows, g, N/P, d], v [rows, g, N/P, e] and the arguments of ``attention``:
    ``causal``, ``window``, ``scale`` and ``documents``, those of the whole sequence in its own order, the same on all ranks. g
    divides h; heads of keys are neither repeated nor sent more than once. Fully masked blocks are not computed. There is no
    dropout.

    Args:
        group: the ranks; None for those of the step's ``T.sequence``, with its layout and documents.
        layout: which positions each of them holds, or its name: "contiguous", "zigzag", "striped". For causal attention zigzag
            balances the ranks.
        save_blocks: keeps all ranks' keys and values (2 g d N elements a row) for the backward pass, and sends them once.

    Raises:
        ValueError: no group and no step that has one; shapes, dtypes, documents or layout do not match.

    Cost: P - 1 messages of 2 g d N/P elements forward, overlapped with computation. Backward P - 1 of gradients, in fp32 for
    half precision, and P - 1 of keys and values again unless they were saved.

    Source: Ring Attention with Blockwise Transformers (arXiv 2310.01889).

    >>> from functional_ds import comm, seq
    >>> x = torch.randn(1, 4, 8, 16)
    >>> def program():
    ...     group = comm.world()
    ...     mine = x[:, :, seq.SequenceLayout("zigzag").positions(8, group.size, group.rank)]
    ...     return ring(group, layout="zigzag")(mine, mine, mine, causal=True).shape
    >>> comm.simulate(program, world_size=2)
    [torch.Size([1, 4, 4, 16]), torch.Size([1, 4, 4, 16])]
    """

    def compute(whole: CutSequence, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = _RingAttention.apply(q, k, v, _Ring(whole, k.shape, v.shape), save_blocks)
        return o

    return cut_attention("ring attention", compute, group=group, layout=layout)
