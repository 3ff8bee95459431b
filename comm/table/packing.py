"""Converts tensors to rows of equal length, in which back ends send pieces, and back."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .collective import CallContext


def by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The indices of the tensors, grouped by dtype and device."""
    places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.dtype, tensor.device), []).append(place)
    return [*places.values()]


def pack_cut(leaf: Tensor, here: CallContext, dim: int | None = None) -> Tensor:
    """A tensor as [n, m], with a row for each rank."""
    dim = here["dim"] if dim is None else dim
    if dim == 0:  # tiled or stacked
        return leaf.reshape(here.n, -1) if leaf.numel() else leaf.new_empty(here.n, 0)
    shape = leaf.shape
    parts = leaf.reshape(*shape[:dim], here.n, shape[dim] // here.n, *shape[dim + 1 :])
    return parts.movedim(dim, 0).reshape(here.n, leaf.numel() // here.n)


def unpack_joined(rows: Tensor, piece: Sequence[int], here: CallContext, dim: int | None = None) -> Tensor:
    """The joined tensor from rows [n, m] that hold pieces of shape ``piece``."""
    if not here.options.get("tiled", True):
        return rows.reshape(here.n, *piece)
    dim = here["dim"] if dim is None else dim
    if dim == 0:
        return rows.reshape(here.n * piece[0], *piece[1:])  # no copy
    return rows.reshape(here.n, *piece).movedim(0, dim).flatten(dim, dim + 1)  # [.., n, d, ..] -> [.., n*d, ..]


def piece_shape(leaf: Tensor, here: CallContext, dim: int | None = None) -> list[int]:
    """The shape of one rank's piece of ``leaf``."""
    shape = list(leaf.shape)
    if not here.options.get("tiled", True):
        return shape[1:]
    shape[here["dim"] if dim is None else dim] //= here.n
    return shape


def unpack_piece(piece: Tensor, leaf: Tensor, here: CallContext) -> Tensor:
    """A payload reshaped to one rank's piece of ``leaf``."""
    return piece.reshape(piece_shape(leaf, here))


def pad_rows(leaf: Tensor, n: int) -> Tensor:
    """The leaf's elements as [n, m], zero-padded at the end; a view if n divides their number."""
    flat, size = leaf.reshape(-1), -(-leaf.numel() // n)
    missing = n * size - flat.numel()
    return (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(n, size)


def pack_rows(leaf: Tensor, here: CallContext) -> Tensor:
    """The leaf as [rows, m], with a row for each index along ``dim``."""
    moved = leaf.movedim(here["dim"], 0)
    return moved.reshape(moved.shape[0], math.prod(moved.shape[1:]))


def unpack_rows(rows: Tensor, leaf: Tensor, here: CallContext) -> Tensor:
    """The inverse of ``pack_rows``, for any number of rows."""
    dim = here["dim"]
    rest = [*leaf.shape[:dim], *leaf.shape[dim + 1 :]]
    return rows.reshape(rows.shape[0], *rest).movedim(0, dim).contiguous()
