"""Ulysses attention: each rank computes some heads on the whole sequence."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.comm.agreement.alike import alike
from functional_ds.comm.record.group import Group
from functional_ds.step.axes import is_for_shapes
from functional_ds.step.pass_scope import current_pass

from .axis import INSIDE_ULYSSES, check_pieces, resolve_axis
from .blockwise import attention as on_one_device
from .blockwise import checked_qkv
from .cut_attention import Attention, shape_of_attention
from .sequence_layout import SequenceLayout


def ulysses(
    attention: Attention | None = None, group: Group | None = None, *, layout: SequenceLayout | str | None = None
) -> Attention:
    """Ulysses attention over sequences split over ranks: an all-to-all gives each rank whole sequences of some heads.

    Law: ``ulysses(a)`` computes ``a``, for every ``a`` that acts on each head, with its gradients. Each rank passes q, k and v
    of its positions, in the layout's order; ``attention`` gets all positions in their own order.

    The function takes q [rows, h, N/P, d], k [rows, g, N/P, d], v [rows, g, N/P, e] and further arguments of ``attention``,
    passed on unchanged, so masks are those of the whole sequence. Each rank gets h / P of the query heads, rounded up or down,
    and the key-value heads that they use; if g < P, each of these goes to several ranks. A rank without a head does not call
    ``attention``.

    Args:
        attention: (q, k, v, ...) to [rows, heads, positions, e]; ``seq.attention`` by default. It may be collective over other
            groups, as ``ring`` is.
        group: the ranks; None for those of the step's ``T.sequence``, with its layout, and for ``seq.attention`` its documents.
        layout: which positions each of them holds, or its name; "contiguous" by default.

    Raises:
        ValueError: no group and no step that has one; shapes, dtypes or the layout do not match; the result has another shape.

    Cost: two all-to-alls, of (h + 2g) d N/P (P - 1)/P elements for q, k and v together and h d N/P (P - 1)/P for the result. If
    g < P, keys and values are 2 N d (P - 1)/P. Backward the same.

    Source: DeepSpeed Ulysses (arXiv 2309.14509).

    >>> from functional_ds import comm
    >>> x = torch.randn(1, 4, 6, 8)
    >>> whole = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> def program():
    ...     group = comm.world()
    ...     mine = x.chunk(group.size, dim=2)[group.rank]
    ...     o = ulysses(torch.nn.functional.scaled_dot_product_attention, group)(mine, mine, mine)
    ...     return torch.allclose(o, whole.chunk(group.size, dim=2)[group.rank], atol=1e-6)
    >>> comm.simulate(program, world_size=3)
    [True, True, True]
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_for_shapes():
            return shape_of_attention(q, k, v)
        ranks, how, numbers = resolve_axis(
            "ulysses", group, layout, documents=kwargs.get("documents"), other=attention is not None
        )
        q, k, v = checked_qkv("ulysses", q, k, v)
        length = q.shape[2] * ranks.size
        if attention is None:
            check_pieces("ulysses", length, ranks, kwargs.get("window"))
            documents = how.documents if numbers is None else numbers
            kwargs = kwargs if documents is None else {"documents": documents, **kwargs}
        runs = tuple(how.runs(length, ranks.size, rank) for rank in range(ranks.size))
        shares = head_shares(q.shape[1], k.shape[1], ranks=ranks.size)
        same = {name: value for name, value in kwargs.items() if isinstance(value, bool | int | float | None)}
        with alike("ulysses", ranks, heads=(q.shape[1], k.shape[1]), **same, layout=how):
            q, k, v = _Exchanged.apply(HeadExchange(ranks, runs, (shares.queries, shares.keys, shares.keys)), True, q, k, v)
        if q.shape[1]:
            k, v = (_expanded(x, shares, ranks.rank) for x in (k, v))
            with _inside(group is None):
                o = (attention or on_one_device)(q, k, v, *args, **kwargs)
            if o.shape != (*q.shape[:3], v.shape[3]):
                raise ValueError(
                    f"ulysses: the attention returned shape {list(o.shape)}, and {[*q.shape[:3], v.shape[3]]} was expected"
                )
        else:
            # without elements, and part of the graph: the backward pass is collective
            o = torch.cat([q, v], dim=-1)[..., : v.shape[3]]
        result: tuple[Tensor] = _Exchanged.apply(HeadExchange(ranks, runs, (shares.queries,)), False, o)
        return result[0]

    return attend


@contextmanager
def _inside(takes_the_axis: bool) -> Iterator[None]:
    """A context in which an attention over the step's own ranks, as this one, raises an error."""
    pass_ = current_pass() if takes_the_axis else None
    with nullcontext() if pass_ is None else pass_.holding(INSIDE_ULYSSES, True):
        yield


_Heads = tuple[range, ...]


@attrs.frozen
class HeadShares:
    """Which heads each rank computes.

    Attributes:
        queries: each rank's query heads; counts differ by at most one.
        keys: the key-value heads that these use; several ranks may have the same.
    """

    queries: _Heads
    keys: _Heads


@lru_cache(maxsize=256)
def head_shares(queries: int, keys: int, *, ranks: int) -> HeadShares:
    """The heads of each rank: query heads as evenly as possible, and the key-value heads that they use.

    Args:
        queries: how many query heads there are.
        keys: how many key-value heads; it divides the former.
        ranks: how many ranks.

    Raises:
        ValueError: it does not divide.

    >>> head_shares(6, 2, ranks=3)
    HeadShares(queries=(range(0, 2), range(2, 4), range(4, 6)), keys=(range(0, 1), range(0, 2), range(1, 2)))
    """
    if keys < 1 or queries % keys:
        raise ValueError(f"{queries} query heads do not divide among {keys} key-value heads")
    per_rank, more = divmod(queries, ranks)
    shares = [range(*cut) for cut in pairwise(accumulate((per_rank + (rank < more) for rank in range(ranks)), initial=0))]
    shared = queries // keys
    used = [range(share.start // shared, -(-share.stop // shared)) if share else range(0) for share in shares]
    return HeadShares(tuple(shares), tuple(used))


@attrs.frozen(eq=False)
class HeadExchange:
    """Exchanges heads for positions of several tensors, with one message between each two ranks.

    To heads, a tensor [rows, heads, N/P, d] becomes [rows, this rank's heads, N, d], in the sequence's order. To positions is
    the transpose: values of a head that several ranks have are summed. Each is the other's gradient.

    Attributes:
        group: the ranks.
        runs: each rank's positions.
        shares: of each tensor, each rank's heads.
    """

    group: Group
    runs: tuple[tuple[range, ...], ...]
    shares: tuple[_Heads, ...]

    def run(self, tensors: tuple[Tensor, ...], *, to_heads: bool) -> tuple[Tensor, ...]:
        """From positions to heads, or back, without gradients."""
        sent, taken = self._shapes(tensors, by_heads=not to_heads), self._shapes(tensors, by_heads=to_heads)
        splits = [[sum(shape.numel() for shape in shapes) for shapes in side] for side in (sent, taken)]
        message = tensors[0].new_empty(sum(splits[0]))
        for rank, place, part in _parts(message, sent):
            for local, view in self._views(tensors[place], place, rank, by_heads=not to_heads):
                part[:, :, local].copy_(view)
        arrived = comm.all_to_all(message, self.group, input_splits=splits[0], output_splits=splits[1])
        results, this_rank = self._results(tensors, to_heads=to_heads), self.group.rank
        for place, (x, result) in enumerate(zip(tensors, results, strict=True)):  # what stays here takes no message
            by_heads, by_positions = (result, x) if to_heads else (x, result)
            ((_, mine),) = self._views(by_positions, place, this_rank, by_heads=False)
            for local, view in self._views(by_heads, place, this_rank, by_heads=True):
                into, value = (view, mine[:, :, local]) if to_heads else (mine[:, :, local], view)
                into.copy_(value)
        for rank, place, part in _parts(arrived, taken):
            sums = not to_heads and _shared(self.shares[place])
            for local, view in self._views(results[place], place, rank, by_heads=to_heads):
                (view.add_ if sums else view.copy_)(part[:, :, local])
        return tuple(result.to(message.dtype) for result in results)

    def _shapes(self, tensors: tuple[Tensor, ...], *, by_heads: bool) -> list[list[torch.Size]]:
        """The parts of each other rank's message, where this rank has tensors by heads or by positions."""
        positions, this_rank = sum(map(len, self.runs[0])), self.group.rank
        heads = [[share[this_rank if by_heads else rank] for share in self.shares] for rank in range(self.group.size)]
        return [
            [torch.Size((x.shape[0], len(part), positions, x.shape[3])) for x, part in zip(tensors, rank_heads, strict=True)]
            if rank != this_rank
            else []
            for rank, rank_heads in enumerate(heads)
        ]

    def _results(self, tensors: tuple[Tensor, ...], *, to_heads: bool) -> list[Tensor]:
        """The output tensors; zeros in a wide dtype if several ranks' values are summed."""
        length, positions, outputs = sum(map(len, itertools.chain(*self.runs))), sum(map(len, self.runs[0])), []
        for x, heads in zip(tensors, self.shares, strict=True):
            if to_heads:
                outputs.append(x.new_empty(x.shape[0], len(heads[self.group.rank]), length, x.shape[3]))
                continue
            shape = x.shape[0], max(share.stop for share in heads), positions, x.shape[3]
            wide = torch.promote_types(x.dtype, torch.float32)
            outputs.append(x.new_zeros(shape, dtype=wide) if _shared(heads) else x.new_empty(shape))
        return outputs

    def _views(self, x: Tensor, place: int, rank: int, *, by_heads: bool) -> Iterator[tuple[slice, Tensor]]:
        """A tensor's part of a message with a rank: places in the message's positions, and the view."""
        if not by_heads:
            heads = self.shares[place][rank]
            yield slice(None), x[:, heads.start : heads.stop]
            return
        start = 0
        for run in self.runs[rank]:
            yield slice(start, start + len(run)), x[:, :, run.start : run.stop : run.step]
            start += len(run)


def _parts(message: Tensor, shapes: list[list[torch.Size]]) -> Iterator[tuple[int, int, Tensor]]:
    """A message's parts as views, with the rank and the number of the tensor."""
    names = [(rank, place) for rank, rank_shapes in enumerate(shapes) for place in range(len(rank_shapes))]
    views = message.split([shape.numel() for rank_shapes in shapes for shape in rank_shapes])
    for (rank, place), view in zip(names, views, strict=True):
        yield rank, place, view.view(shapes[rank][place])


def _shared(heads: _Heads) -> bool:
    """Whether several ranks have the same head."""
    return sum(map(len, heads)) > max(share.stop for share in heads)


class _Exchanged(torch.autograd.Function):
    """Tensors from positions to heads, or back, which is the transpose."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return exchange.run(tensors, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *_Exchanged.apply(ctx.exchange, not ctx.to_heads, *grads))


def _expanded(x: Tensor, shares: HeadShares, rank: int) -> Tensor:
    """This rank's key-value heads, repeated unless each serves equally many query heads."""
    queries, keys = shares.queries[rank], shares.keys[rank]
    group = max(share.stop for share in shares.queries) // max(share.stop for share in shares.keys)
    used = [head // group - keys.start for head in queries]
    repeats, rest = divmod(len(queries), len(keys))
    if rest == 0 and used == [place // repeats for place in range(len(queries))]:
        return x
    return torch.cat([x[:, head : head + 1] for head in used], dim=1)
