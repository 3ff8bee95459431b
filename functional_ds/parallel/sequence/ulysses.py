"""Ulysses attention: each rank computes some heads on the whole sequence."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from functional_ds.comm.agreement.alike import alike
from functional_ds.comm.record.group import Group
from functional_ds.step.axes import is_for_shapes
from functional_ds.step.pass_scope import current_pass

from .axis import INSIDE_ULYSSES, check_pieces, resolve_axis
from .blockwise import attention as on_one_device
from .blockwise import checked_qkv
from .cut_attention import Attention, shape_of_attention
from .head_exchange import HeadExchange, HeadShares, head_shares
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
        runs = tuple(how.runs(length, ranks.size, rank) for rank in range(ranks.size))
        if attention is None:
            documents = how.documents if numbers is None else numbers
            kwargs = kwargs if documents is None else {"documents": documents, **kwargs}
        shares = head_shares(q.shape[1], k.shape[1], ranks=ranks.size)
        same = {name: value for name, value in kwargs.items() if isinstance(value, bool | int | float | None)}
        with alike("ulysses", ranks, heads=(q.shape[1], k.shape[1]), **same, layout=how):
            q, k, v = HeadExchange(ranks, runs, (shares.queries, shares.keys, shares.keys)).to_heads(q, k, v)
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
        (o,) = HeadExchange(ranks, runs, (shares.queries,)).to_positions(o)
        return o

    return attend


@contextmanager
def _inside(takes_the_axis: bool) -> Iterator[None]:
    """A context in which an attention over the step's own ranks, as this one, raises an error."""
    pass_ = current_pass() if takes_the_axis else None
    with nullcontext() if pass_ is None else pass_.holding(INSIDE_ULYSSES, True):
        yield


def _expanded(x: Tensor, shares: HeadShares, rank: int) -> Tensor:
    """This rank's key-value heads, repeated unless each serves equally many query heads."""
    queries, keys = shares.queries[rank], shares.keys[rank]
    group = max(share.stop for share in shares.queries) // max(share.stop for share in shares.keys)
    used = [head // group - keys.start for head in queries]
    repeats, rest = divmod(len(queries), len(keys))
    if rest == 0 and used == [place // repeats for place in range(len(queries))]:
        return x
    return torch.cat([x[:, head : head + 1] for head in used], dim=1)
