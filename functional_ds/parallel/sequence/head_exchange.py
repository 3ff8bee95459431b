"""The exchange of a sequence's pieces of all heads for whole sequences of some heads, and back."""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.comm.record.group import Group

__all__ = ["HeadExchange", "HeadShares", "head_shares"]

_Heads = tuple[range, ...]


@attrs.frozen
class HeadShares:
    """Which heads each rank computes with.

    Attributes:
        queries: each rank's query heads; counts differ by one at most.
        keys: the key-value heads that these use, of which several ranks may have the same.
    """

    queries: _Heads
    keys: _Heads


@lru_cache(maxsize=256)
def head_shares(queries: int, keys: int, *, ranks: int) -> HeadShares:
    """The heads of each rank: query heads as evenly as it goes, and the key-value heads that they use.

    Args:
        queries: how many query heads there are.
        keys: how many key-value heads; it divides the former.
        ranks: how many ranks.

    >>> head_shares(6, 2, ranks=3)
    HeadShares(queries=(range(0, 2), range(2, 4), range(4, 6)), keys=(range(0, 1), range(0, 2), range(1, 2)))
    """
    each, more = divmod(queries, ranks)
    shares = [range(*cut) for cut in pairwise(accumulate((each + (rank < more) for rank in range(ranks)), initial=0))]
    shared = queries // keys
    used = [range(share.start // shared, -(-share.stop // shared)) if share else range(0) for share in shares]
    return HeadShares(tuple(shares), tuple(used))


@attrs.frozen(eq=False)
class HeadExchange:
    """Several tensors' exchange of heads for positions, as one message between each two ranks.

    To heads, a tensor [rows, heads, N/P, d] becomes [rows, this rank's heads, N, d], in the sequence's order. Back is the
    transpose: where ranks have the same head, their values are summed. Each is the other's gradient.

    Attributes:
        group: the ranks.
        runs: each rank's positions.
        shares: of each tensor, each rank's heads.
    """

    group: Group
    runs: tuple[tuple[range, ...], ...]
    shares: tuple[_Heads, ...]

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From positions to heads."""
        found: tuple[Tensor, ...] = _Exchanged.apply(self, True, *tensors)
        return found

    def to_positions(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From heads to positions."""
        found: tuple[Tensor, ...] = _Exchanged.apply(self, False, *tensors)
        return found

    def run(self, tensors: tuple[Tensor, ...], *, to_heads: bool) -> tuple[Tensor, ...]:
        """Either of the two, without gradients."""
        sent, taken = self._shapes(tensors, by_heads=not to_heads), self._shapes(tensors, by_heads=to_heads)
        message = self._pack(tensors, sent, by_heads=not to_heads)
        splits = [[sum(shape.numel() for shape in shapes) for shapes in side] for side in (sent, taken)]
        arrived = comm.all_to_all(message, self.group, input_splits=splits[0], output_splits=splits[1])
        return self._unpack(arrived, taken, by_heads=to_heads)

    def _shapes(self, tensors: tuple[Tensor, ...], *, by_heads: bool) -> list[list[torch.Size]]:
        """The parts of each rank's message, where this rank has tensors by heads or by positions."""
        positions, own = sum(map(len, self.runs[0])), self.group.rank
        counts = [[len(heads[own if by_heads else rank]) for heads in self.shares] for rank in range(self.group.size)]
        return [
            [torch.Size((x.shape[0], count, positions, x.shape[3])) for x, count in zip(tensors, found, strict=True)]
            for found in counts
        ]

    def _pack(self, tensors: tuple[Tensor, ...], shapes: list[list[torch.Size]], *, by_heads: bool) -> Tensor:
        message = tensors[0].new_empty(sum(shape.numel() for each in shapes for shape in each))
        for rank, place, part in _parts(message, shapes):
            if by_heads:
                for local, run in self._pieces(rank):
                    part[:, :, local].copy_(tensors[place][:, :, run])
            else:
                heads = self.shares[place][rank]
                part.copy_(tensors[place][:, heads.start : heads.stop])
        return message

    def _unpack(self, message: Tensor, shapes: list[list[torch.Size]], *, by_heads: bool) -> tuple[Tensor, ...]:
        length, positions, found = sum(map(len, itertools.chain(*self.runs))), sum(map(len, self.runs[0])), []
        for heads, shape in zip(self.shares, shapes[0], strict=True):
            if by_heads:
                found.append(message.new_empty(shape[0], shape[1], length, shape[3]))
            else:
                dtype = torch.promote_types(message.dtype, torch.float32) if _shared(heads) else message.dtype
                count = max(each.stop for each in heads)
                found.append(message.new_zeros((shape[0], count, positions, shape[3]), dtype=dtype))
        for rank, place, part in _parts(message, shapes):
            heads = self.shares[place]
            if by_heads:
                for local, run in self._pieces(rank):
                    found[place][:, :, run].copy_(part[:, :, local])
            elif _shared(heads):
                found[place][:, heads[rank].start : heads[rank].stop] += part
            else:
                found[place][:, heads[rank].start : heads[rank].stop].copy_(part)
        return tuple(each.to(message.dtype) for each in found)

    def _pieces(self, rank: int) -> Iterator[tuple[slice, slice]]:
        """Where a rank's positions lie in its piece, and where in the sequence."""
        start = 0
        for run in self.runs[rank]:
            yield slice(start, start + len(run)), slice(run.start, run.stop, run.step)
            start += len(run)


def _parts(message: Tensor, shapes: list[list[torch.Size]]) -> Iterator[tuple[int, int, Tensor]]:
    """A message's parts as views, with the rank and the number of the tensor."""
    names = [(rank, place) for rank, each in enumerate(shapes) for place in range(len(each))]
    views = message.split([shape.numel() for each in shapes for shape in each])
    for (rank, place), view in zip(names, views, strict=True):
        yield rank, place, view.view(shapes[rank][place])


def _shared(heads: _Heads) -> bool:
    """Whether ranks have the same head."""
    return sum(map(len, heads)) > max(each.stop for each in heads)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return exchange.run(tensors, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *_Exchanged.apply(ctx.exchange, not ctx.to_heads, *grads))
