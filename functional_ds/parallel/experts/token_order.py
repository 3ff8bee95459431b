"""Sorts tokens as rows by expert, and back: a permutation that the backward pass reuses."""

from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class TokenOrder:
    """The kept choices of T tokens, k each, sorted by expert.

    Attributes:
        pairs: [R] integers: row r is the choice ``pairs[r]``, counted as token · k + place among its k.
        places: [T, k] integers: the row of each choice; undefined if it is dropped.
        kept: [T, k]; None if all are kept.
    """

    pairs: Tensor
    places: Tensor
    kept: Tensor | None

    @staticmethod
    def of(experts: Tensor, kept: Tensor | None, count: int) -> "TokenOrder":
        """The order of all choices, dropped ones last; ``cut`` removes them.

        Args:
            experts: [T, k].
            kept: [T, k]; None for all.
            count: the number of experts.
        """
        flat = experts.flatten() if kept is None else experts.masked_fill(~kept, count).flatten()
        pairs = flat.argsort(stable=True)
        places = torch.empty_like(pairs)
        places[pairs] = torch.arange(len(pairs), device=pairs.device)
        return TokenOrder(pairs, places.view(experts.shape), kept)

    def cut(self, rows: int) -> "TokenOrder":
        """The first rows only: those that are kept."""
        return attrs.evolve(self, pairs=self.pairs[:rows], places=self.places.clamp(max=max(rows - 1, 0)))

    @property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.pairs // self.places.shape[1]


def spread(x: Tensor, order: TokenOrder) -> Tensor:
    """The token of each row: [T, M] to [R, M]. Its transpose sums a token's rows, without sorting again."""
    rows: Tensor = _SpreadTokens.apply(x, order)
    return rows


def combine(rows: Tensor, weights: Tensor | None, order: TokenOrder) -> Tensor:
    """Each token's rows times their weights, summed in the order of its choices, in fp32 at least: [R, M] to [T, M].

    ``combine(spread(x), weights) = (Σ kept weights) x``.
    """
    tokens: Tensor = _CombineRows.apply(rows, weights, order)
    return tokens


class _SpreadTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: TokenOrder) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return combine(grad, None, ctx.order), None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, order: TokenOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(*([] if weights is None else [rows, weights]))
        tokens, k = order.places.shape
        if k == 1 and weights is None and order.kept is None:
            return rows.index_select(0, order.places[:, 0])
        wide = rows.dtype if rows.dtype == torch.float64 or weights is None else torch.promote_types(rows.dtype, weights.dtype)
        wide = torch.promote_types(wide, torch.float32)
        total = torch.zeros(tokens, rows.shape[1], dtype=wide, device=rows.device)
        for j in range(k if len(rows) else 0):
            picked = rows.index_select(0, order.places[:, j])
            if order.kept is not None:  # a dropped choice takes another's row, which may be infinite
                picked.masked_fill_(~order.kept[:, j, None], 0)
            total = total.add_(picked) if weights is None else total.addcmul_(picked.to(wide), weights[:, j, None].to(wide))
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        order: TokenOrder = ctx.order
        by_row = spread(grad, order)
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint recomputes at the first access and raises at a second
        if not saved:
            return by_row, None, None
        rows, weights = saved
        factors = weights.flatten().index_select(0, order.pairs)[:, None]
        by_rows = (by_row * factors).to(rows.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return by_rows, None, None
        if not len(rows):
            return by_rows, torch.zeros_like(weights), None
        wide = torch.promote_types(torch.promote_types(rows.dtype, weights.dtype), torch.float32)
        products = (rows.to(wide) * by_row).sum(1).to(weights.dtype)  # [R]
        by_weights = products.index_select(0, order.places.flatten()).view(order.places.shape)
        return by_rows, by_weights if order.kept is None else by_weights.masked_fill(~order.kept, 0), None
