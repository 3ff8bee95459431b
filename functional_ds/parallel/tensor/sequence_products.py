"""All-gather-matmul and matmul-reduce-scatter in pieces, so that communication overlaps the products."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm


def gathered_products(
    x: Tensor, weights: Sequence[Tensor], *, group: comm.Group, dim: int, chunks: int, regather: bool
) -> list[Tensor]:
    """``all_gather(x) @ wᵀ`` for each weight.

    Args:
        x: this rank's part along ``dim``, [..., inputs].
        weights: [outputs, inputs] each.
        group: the ranks.
        dim: the dim that is gathered.
        chunks: how many messages the gather is, and the reduction of the backward pass.
        regather: whether the backward pass gathers ``x`` again; else what was gathered stays.

    Raises:
        ValueError: this rank's part does not divide by ``chunks``.
    """
    _check_chunks(x.shape, dim, x.shape[dim], chunks)
    views = (weight.view_as(weight) for weight in weights)  # a parameter's gradient may not come out of a custom function
    products: tuple[Tensor, ...] = _GatheredProducts.apply(x, group, dim, chunks, regather, *views)
    return list(products)


def scattered_product(x: Tensor, weight: Tensor, *, group: comm.Group, dim: int, chunks: int) -> Tensor:
    """``reduce_scatter(x @ weightᵀ)``.

    Args:
        x: [..., inputs], whole along ``dim``.
        weight: [outputs, inputs].
        group: the ranks.
        dim: the dim that is scattered.
        chunks: how many messages the reduction is, and the gather of the backward pass.

    Raises:
        ValueError: the dim does not divide by the ranks and ``chunks``.
    """
    _check_chunks(x.shape, dim, x.shape[dim], group.size * chunks)
    product: Tensor = _ScatteredProduct.apply(x, weight.view_as(weight), group, dim, chunks)
    return product


def _check_chunks(shape: Sequence[int], dim: int, size: int, parts: int) -> None:
    if size % parts:
        raise ValueError(f"chunks: a tensor of shape {list(shape)} does not divide along dim {dim} into {parts} equal parts")


def _gather(x: Tensor, group: comm.Group, dim: int, chunks: int) -> list[comm.Pending[Tensor]]:
    """The j-th is the j-th piece of every rank's part."""
    return [comm.start(comm.all_gather, piece, group, dim=dim) for piece in x.chunk(chunks, dim)]


def _scatter(piece_of: Callable[[int], Tensor], group: comm.Group, dim: int, chunks: int) -> list[comm.Pending[Tensor]]:
    """Starts each reduction as soon as its product is there."""
    return [comm.start(comm.reduce_scatter, piece_of(j), group, dim=dim) for j in range(chunks)]


def _pieces(whole: Tensor, n: int, dim: int, chunks: int) -> list[Tensor]:
    """The rows that belong to ``_gather``'s pieces."""
    if chunks == 1:
        return [whole]
    parts = whole.unflatten(dim, (n, chunks, -1))
    return [parts.select(dim + 1, j).flatten(dim, dim + 1) for j in range(chunks)]


def _assembled(pieces: Sequence[Tensor], n: int, dim: int) -> Tensor:
    """The inverse of ``_pieces``."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.stack([piece.unflatten(dim, (n, -1)) for piece in pieces], dim + 1).flatten(dim, dim + 2)


def _weight_gradient(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    products = [g.flatten(0, -2).t() @ x.flatten(0, -2) for g, x in zip(grads, inputs, strict=True)]
    return functools.reduce(torch.add, products)


class _GatheredProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: comm.Group, dim: int, chunks: int, regather: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.dim, ctx.chunks, ctx.regather = group, dim, chunks, regather
        gathered, outputs = [], []
        for pending in _gather(x, group, dim, chunks):
            gathered.append(pending.wait())
            outputs.append([gathered[-1] @ weight.t() for weight in weights])
        kept = [x] if regather else gathered
        ctx.save_for_backward(*weights, *kept)
        ctx.count = len(weights)
        return tuple(_assembled(pieces, group.size, dim) for pieces in zip(*outputs, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        group, dim, chunks = ctx.group, ctx.dim, ctx.chunks
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint recomputes at the first access and raises at a second
        weights, kept = saved[: ctx.count], saved[ctx.count :]
        pieces = [_pieces(grad, group.size, dim, chunks) for grad in grads]
        wants_x, wants_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        again = _gather(kept[0], group, dim, chunks) if ctx.regather and any(wants_weights) else []

        def product(j: int) -> Tensor:
            total: Tensor = functools.reduce(torch.add, [parts[j] @ w for parts, w in zip(pieces, weights, strict=True)])
            return total

        reduced = _scatter(product, group, dim, chunks) if wants_x else []
        inputs = [pending.wait() for pending in again] if ctx.regather else kept
        of_weights = [_weight_gradient(parts, inputs) if w else None for parts, w in zip(pieces, wants_weights, strict=True)]
        of_x = torch.cat([pending.wait() for pending in reduced], dim) if wants_x else None
        return (of_x, None, None, None, None, *of_weights)


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: comm.Group, dim: int, chunks: int) -> Tensor:
        ctx.group, ctx.dim, ctx.chunks = group, dim, chunks
        ctx.save_for_backward(x, weight)
        pieces = _pieces(x, group.size, dim, chunks)
        reduced = _scatter(lambda j: pieces[j] @ weight.t(), group, dim, chunks)
        return torch.cat([pending.wait() for pending in reduced], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, weight), group, dim, chunks = ctx.saved_tensors, ctx.group, ctx.dim, ctx.chunks
        gathered, of_x = [], []
        for pending in _gather(grad, group, dim, chunks):
            gathered.append(pending.wait())
            of_x.append(gathered[-1] @ weight)
        of_weight = _weight_gradient(gathered, _pieces(x, group.size, dim, chunks)) if ctx.needs_input_grad[1] else None
        return _assembled(of_x, group.size, dim), of_weight, None, None, None
