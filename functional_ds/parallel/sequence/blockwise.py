"""Blockwise attention: computed for one block of keys at a time, without a matrix of all scores."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree

from .block_attention import attend, attend_backward, takes
from .block_products import BlockProduct, products
from .sequence_layout import SequenceLayout

_TILE = 1 << 20
_Runs = tuple[range, ...]
Partial = tuple[Tensor, Tensor]  # the attention to some keys, and its log-sum-exp, wide enough to sum in


@attrs.frozen(eq=False)
class AttentionMask:
    """Which positions attend to which, as data.

    Attributes:
        causal: a position attends only to itself and earlier ones.
        window: to how many positions at most, itself included.
        lengths: document lengths in order, known to the host; attention stays within documents.
        documents: int [rows or 1, length], in the sequence's order: attention stays among equal numbers; -1 is padding.
    """

    causal: bool = False
    window: int | None = None
    lengths: tuple[int, ...] | None = None
    documents: Tensor | None = attrs.field(default=None, repr=tree.summary)

    def __attrs_post_init__(self) -> None:
        if self.window is not None and (not self.causal or self.window < 1):
            raise ValueError(
                f"window={self.window}, causal={self.causal}: a window is at least 1, and only causal attention has one"
            )

    def products(self, rows: _Runs, cols: _Runs) -> tuple[BlockProduct, ...]:
        """What is to be computed of these rows and columns."""
        return products(rows, cols, causal=self.causal, window=self.window, documents=self.lengths)

    def allowed(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Which of these positions attend to which: bool [rows or 1, 1, S, K]."""
        q, k = rows.unsqueeze(-1), cols.unsqueeze(-2)
        allowed = q >= k if self.causal else torch.ones_like(q + k, dtype=torch.bool)
        if self.window is not None:
            allowed = allowed & (q - k < self.window)
        if self.documents is None:
            return allowed[None, None]
        numbers, others = self.documents.index_select(1, rows), self.documents.index_select(1, cols)
        same = (numbers.unsqueeze(2) == others.unsqueeze(1)) & (others >= 0).unsqueeze(1)
        return (allowed & same).unsqueeze(1)


@attrs.frozen(eq=False)
class Keys:
    """Some keys and values, with their positions."""

    k: Tensor = attrs.field(repr=tree.summary)
    v: Tensor = attrs.field(repr=tree.summary)
    runs: _Runs


@attrs.define(eq=False)
class Total:
    """A sum in memory that need not be zeroed before.

    Attributes:
        memory: [rows, heads, positions, d]; its initial values are ignored.
        empty: whether nothing was added so far.
    """

    memory: Tensor = attrs.field(repr=tree.summary)
    empty: bool = True

    def add(self, where: slice, value: Tensor) -> None:
        """Adds to these positions."""
        part = self.memory[:, :, where]
        if not self.empty:
            part += value
            return
        if part.shape != self.memory.shape:
            self.memory.zero_()
        part.copy_(value)
        self.empty = False

    def sum(self) -> Tensor:
        """What was added."""
        return self.memory.zero_() if self.empty else self.memory


@attrs.frozen(eq=False)
class Queries:
    """Some queries, with their positions, whose keys come block by block.

    Attributes:
        q: [rows, h, S, d].
        runs: the queries' positions.
        mask: which keys they see.
        scale: of scores.
    """

    q: Tensor = attrs.field(repr=tree.summary)
    runs: _Runs
    mask: AttentionMask
    scale: float

    def add(self, keys: Keys, so_far: Partial | None) -> Partial:
        """Merges the attention to these keys into ``so_far``, which is written to; None for no keys."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        for part, rows, cols, mask in self._parts(keys):
            o, lse = attend(
                self.q[:, :, rows],
                keys.k[:, :, cols],
                keys.v[:, :, cols],
                scale=self.scale,
                causal=part.kind == "causal",
                mask=mask,
            )
            if so_far is None and o.shape[2] == self.q.shape[2]:
                so_far = o.to(wide), lse.to(wide)
                continue
            so_far = self._nothing(keys.v, wide) if so_far is None else so_far
            merge_into(so_far[0][:, :, rows], so_far[1][:, :, rows], o, lse)
        return self._nothing(keys.v, wide) if so_far is None else so_far

    def _nothing(self, v: Tensor, dtype: torch.dtype) -> Partial:
        """The attention to no key."""
        rows = self.q.shape[:3]
        return self.q.new_zeros((*rows, v.shape[-1]), dtype=dtype), self.q.new_full(rows, -torch.inf, dtype=dtype)

    def add_gradients(self, keys: Keys, grad: Tensor, o: Tensor, lse: Tensor, *, into: Sequence[Total]) -> None:
        """Adds these keys' part of the gradients, by q and by these keys and values, to ``into``.

        Args:
            keys: whose part.
            grad: of the loss by the attention.
            o: the attention to all keys.
            lse: of all scores; +inf for queries without keys.
            into: three sums.
        """
        for part, rows, cols, mask in self._parts(keys):
            grads = attend_backward(
                grad[:, :, rows],
                self.q[:, :, rows],
                keys.k[:, :, cols],
                keys.v[:, :, cols],
                o=o[:, :, rows],
                lse=lse[:, :, rows],
                scale=self.scale,
                causal=part.kind == "causal",
                mask=mask,
            )
            for total, where, gradient in zip(into, (rows, cols, cols), grads, strict=True):
                total.add(where, gradient)

    def _parts(self, keys: Keys) -> "Iterator[tuple[BlockProduct, slice, slice, Tensor | None]]":
        if self.q.numel() == 0 or keys.k.numel() == 0:
            return
        device = self.q.device
        at = functools.cache(lambda runs: torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in runs]))
        formula = takes(self.q, keys.v, self.mask.documents is not None) == "formula"
        for product in self.mask.products(self.runs, keys.runs):
            masked = product.kind == "masked" or self.mask.documents is not None
            for part in product.tiles(_TILE) if masked or formula else (product,):
                rows, cols = slice(*part.rows), slice(*part.cols)
                if masked or part.kind == "masked":
                    yield part, rows, cols, self.mask.allowed(at(self.runs)[rows], at(keys.runs)[cols])
                else:
                    yield part, rows, cols, None


def empty_to_infinite(lse: Tensor) -> Tensor:
    """The log-sum-exp for gradients: queries without keys have weights exp(score - inf) = 0."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


class _Blockwise(torch.autograd.Function):
    """Attention of the queries to one block of keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: _Runs, cols: _Runs, mask: AttentionMask, scale: float
    ) -> Tensor:
        wide, lse = Queries(q, rows, mask, scale).add(Keys(k, v, cols), None)
        o = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = rows, cols, mask, scale
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        rows, cols, mask, scale = ctx.rest
        into = [Total(torch.empty_like(x, dtype=lse.dtype)) for x in (q, k, v)]
        Queries(q, rows, mask, scale).add_gradients(Keys(k, v, cols), grad, o, empty_to_infinite(lse), into=into)
        return (*(total.sum().to(q.dtype) for total in into), None, None, None, None)


def blockwise(q: Tensor, keys: Keys, *, rows: _Runs, mask: AttentionMask, scale: float) -> Tensor:
    """Attention of queries at the positions ``rows`` to these keys; differentiable."""
    o: Tensor = _Blockwise.apply(q, keys.k, keys.v, rows, keys.runs, mask, scale)
    return o


def resolved_scale(q: Tensor, scale: float | None) -> float:
    """The scale, 1 / √d by default."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def checked_qkv(what: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [rows, h, S, d], k [rows, g, S, d] and v [rows, g, S, e] of attention of a sequence to itself, in autocast's dtype.

    Raises:
        ValueError: their shapes or dtypes do not fit.
    """
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(f"{what}: {shapes}: each must be [rows, heads, positions, size of a head]")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{what}: {shapes}: rows, sizes of heads of q and k, and heads and positions of k and v must agree")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{what}: {shapes}: {q.shape[1]} query heads do not divide among {k.shape[1]} key-value heads")
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{what}: {q.shape[2]} queries and {k.shape[2]} keys: a sequence attends to itself, so a rank holds the same "
            "positions of both"
        )
    device_type, wide = q.device.type, torch.float64 in (q.dtype, k.dtype, v.dtype)
    if not wide and torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"{what}: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; cast them to one dtype")
    return q, k, v


def without_autocast(q: Tensor) -> AbstractContextManager[None]:
    """A context in which products use the dtypes of their inputs, as in the backward pass."""
    device_type = q.device.type
    return torch.autocast(device_type, enabled=False) if torch.amp.is_autocast_available(device_type) else nullcontext()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: Tensor | Sequence[int] | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention on one device, block by block: the same as ``ring`` on one rank.

    Law: it equals ``scaled_dot_product_attention`` with the mask that the arguments describe; queries without keys get zeros.

    Args:
        q: [rows, h, length, d].
        k: [rows, g, length, d], where g divides h.
        v: [rows, g, length, e].
        causal: whether positions attend only to themselves and earlier ones.
        window: to how many positions at most, itself included.
        documents: attention stays within documents: their lengths in order, or int [rows or 1, length] with their numbers, -1
            for padding.
        scale: of scores; 1 / √d by default.

    Raises:
        ValueError: shapes, dtypes or masks do not match.

    >>> q = torch.randn(1, 4, 6, 8)
    >>> attention(q, q[:, :2], q[:, :2], causal=True, documents=[4, 2]).shape
    torch.Size([1, 4, 6, 8])
    """
    q, k, v = checked_qkv("attention", q, k, v)
    runs = (range(q.shape[2]),)
    mask = mask_of(causal, window, documents, length=q.shape[2], rows=q.shape[0])
    with without_autocast(q):
        return blockwise(q, Keys(k, v, runs), rows=runs, mask=mask, scale=resolved_scale(q, scale))


def mask_of(
    causal: bool,
    window: int | None,
    documents: Tensor | Sequence[int] | None,
    *,
    length: int,
    rows: int,
    layout: SequenceLayout | None = None,
) -> AttentionMask:
    """The mask that an attention's arguments describe, checked.

    Args:
        causal: as in ``attention``.
        window: as in ``attention``.
        documents: as in ``attention``.
        length: of the whole sequence.
        rows: of the batch.
        layout: whose documents are used, if there are any.

    Raises:
        ValueError: it does not match the sequence or the layout.
    """
    numbers = documents if isinstance(documents, Tensor) else None
    lengths = None if documents is None or numbers is not None else tuple(int(size) for size in documents)
    if lengths is not None and (sum(lengths) != length or min(lengths, default=1) < 1):
        raise ValueError(f"documents={list(lengths)}: lengths of at least 1 that add up to {sum(lengths)}, not to {length}")
    of_layout = None if layout is None else layout.documents
    if None not in (lengths, of_layout) and lengths != of_layout:
        raise ValueError(f"documents={list(lengths or ())}, and the layout has those of lengths {list(of_layout or ())}")
    mask = AttentionMask(causal, window, lengths or of_layout, numbers)
    if numbers is not None and (numbers.dim() != 2 or numbers.shape[1] != length or numbers.shape[0] not in (1, rows)):
        raise ValueError(
            f"documents has shape {list(numbers.shape)}; it must be [{rows} or 1, {length}], numbers of all positions of the "
            "whole sequence in its own order"
        )
    return mask


def merge(o: Tensor, lse: Tensor, other: Tensor, *, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each.

    Law: it is associative and commutative, and (0, -inf), the attention to no key, is its identity:
    o - σ(l' - l) (o - o') and l - log σ(l - l').

    Args:
        o: [..., d], softmax-weighted values of the first keys.
        lse: [...], the logarithm of the sum of exponentials of their scores; -inf where there are none.
        other: the same of the other keys.
        other_lse: the same of the other keys.

    Source: online normalizer calculation for softmax (arXiv 1805.02867); Blockwise Parallel Transformer (arXiv 2305.19370).

    >>> merge(torch.zeros(1), torch.tensor(-torch.inf), torch.ones(1), other_lse=torch.tensor(2.0))
    (tensor([1.]), tensor(2.))
    """
    o, lse = o.clone(), lse.clone()
    merge_into(o, lse, other, other_lse)
    return o, lse


def merge_into(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """``merge``, which writes its results into the first two."""
    total = torch.logaddexp(lse, other_lse)
    weight = torch.exp(other_lse - total).masked_fill_(total == -torch.inf, 0)  # where there is no key at all: -inf + inf
    o.lerp_(other.to(o.dtype), weight.unsqueeze(-1))
    lse.copy_(total)
