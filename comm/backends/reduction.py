"""Reductions of several ranks' values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_WIDENED = 2**20  # elements of half precision that are copied to fp32 at a time


def _product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """torch.mul; complex products by parts, since torch's vectorized kernel rounds a tensor's tail differently."""
    if not a.is_complex():
        return torch.mul(a, b, out=out)
    product = torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
    return product if out is None else out.copy_(product)


OPS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "product": _product, "min": torch.minimum, "max": torch.maximum}


def combine(a: Tensor, b: Tensor, op: str) -> Tensor:
    """Reduces two values elementwise."""
    return OPS[op](a, b)


def fold(pieces: Sequence[Tensor], op: str, *, out: Tensor | None = None) -> Tensor:
    """Reduces the ranks' pieces from left to right, in rank order.

    Half-precision sums and products are computed in fp32, some rows at a time, and rounded once. The result is a new tensor, or
    ``out``, which may be one of the first two pieces.
    """
    first, *rest = pieces
    binary = OPS[op]
    if not rest:
        return first.clone() if out is None else out.copy_(first)
    if first.dtype in (torch.float16, torch.bfloat16) and op in ("sum", "product"):
        total = torch.empty_like(first) if out is None else out
        rows = max(1, _WIDENED * len(first) // max(1, first.numel())) if first.dim() else 0
        for into, *parts in zip(*(x.split(rows) if rows else [x] for x in (total, *pieces)), strict=True):
            into.copy_(_folded(binary, parts[0].float(), parts[1:]))
        return total
    return _folded(binary, binary(first, rest[0], out=out), rest[1:])


def _folded(binary: Callable[..., Tensor], total: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    for piece in pieces:
        binary(total, piece, out=total)
    return total


def fold_by_node(pieces: Sequence[Tensor], options: Mapping[str, Any]) -> Tensor:
    """Reduces the pieces of each node by ``options["op"]``, then the results, each rounded to the pieces' dtype.

    ``options["ranks_per_node"]`` is the number of consecutive ranks per node; without it all pieces are reduced at once.
    """
    op, per_node = options["op"], options.get("ranks_per_node", 1)
    if per_node > 1:
        pieces = [fold(pieces[i : i + per_node], op) for i in range(0, len(pieces), per_node)]
    return fold(pieces, op)


def chunk_bounds(numel: int, n: int) -> list[int]:
    """The n + 1 bounds of n contiguous pieces of ``numel`` elements; the last pieces may be shorter or empty."""
    size = -(-numel // n)
    return [min(i * size, numel) for i in range(n + 1)]
