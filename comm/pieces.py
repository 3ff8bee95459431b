"""Flat payloads in equal pieces, and pieces combined: what the algorithms are made of."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .fold import combine

__all__ = ["combined", "cut", "joined"]


def cut(flat: Tensor, n: int) -> list[Tensor]:
    """n pieces of one size, [N] -> n of [m]; zeros fill the last ones up."""
    size = -(-flat.numel() // n)
    if missing := n * size - flat.numel():
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return list(flat.view(n, size).unbind(0))


def joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """The inverse of ``cut``."""
    if like.is_meta:  # there torch.cat takes milliseconds for a thousand pieces
        return torch.empty_like(like)
    return torch.cat(list(pieces))[: like.numel()]


def combined(a: Tensor, b: Tensor, op: str) -> Tensor:
    """Callers give all ranks the same first: 0.0 and -0.0 have two maxima, and a NaN has many bits."""
    return a if a.is_meta else combine(a, b, op)
