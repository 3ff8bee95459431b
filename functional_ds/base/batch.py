"""Splits batches into micro-batches, along dim 0 of their leaves."""

from itertools import accumulate
from typing import Any

from . import tree
from .tree import rows_of


def micro_rows(batch: Any, k: int) -> list[int]:
    """The number of rows of each of k micro-batches; the first ones may have one more."""
    rows = rows_of(batch)
    return [rows // k + (i < rows % k) for i in range(k)]


def split(batch: Any, k: int, *, uneven: bool = False) -> list[Any]:
    """Splits a batch into k micro-batches of equally many rows; with ``uneven`` the first ones may have one more.

    Leaves may have different numbers of rows, in a fixed ratio; they are split in proportion. A leaf with one row, or without
    rows (a number, a scalar tensor), is part of every micro-batch.

    Raises:
        ValueError: no leaf has rows; a leaf has too few rows, rows that are not a multiple of k, or rows that cannot be split
            in proportion to the others.

    >>> import torch
    >>> [part.tolist() for part in split(torch.arange(5), 2, uneven=True)]
    [[0, 1, 2], [3, 4]]
    >>> [len(pair[1]) for pair in split((torch.arange(5), torch.arange(10)), 2, uneven=True)]
    [6, 4]
    >>> [(len(x), scale.shape, n) for x, scale, n in split((torch.arange(4), torch.ones(1, 3), 7), 2)]
    [(2, torch.Size([1, 3]), 7), (2, torch.Size([1, 3]), 7)]
    """
    if k == 1:
        return [batch]
    spec = tree.structure(batch)
    if not any(map(tree.has_rows, tree.leaves(batch))):
        raise ValueError(f"batch: {tree.summary(batch)} has no rows to split into {k} micro-batches")
    rows = rows_of(batch)
    cuts = list(accumulate(micro_rows(batch, k)))[:-1]
    pieces = []
    for path, leaf in tree.named(batch):
        if not tree.has_rows(leaf) or (leaf.shape[0] == 1 and rows > 1):
            pieces.append([leaf] * k)
            continue
        _check(path, leaf.shape[0], k, rows=rows, cuts=cuts, uneven=uneven)
        pieces.append(list(leaf.tensor_split([cut * leaf.shape[0] // rows for cut in cuts])))
    return [tree.unflatten(spec, parts) for parts in zip(*pieces, strict=True)]


def _check(path: str, count: int, k: int, *, rows: int, cuts: list[int], uneven: bool) -> None:
    where = f"batch: the leaf at {path or 'the top'!r}"
    if count % k and not uneven:
        raise ValueError(
            f"{where} has {count} rows, which do not divide into {k} micro-batches; use a multiple of {k} rows on each rank"
        )
    if count < k:
        raise ValueError(f"{where} has {count} rows, too few for {k} micro-batches; use at least {k}")
    if any(cut * count % rows for cut in cuts):
        raise ValueError(
            f"batch: the leaf at {path!r} has {count} rows and another {rows}, which cannot be split into {k} micro-batches "
            f"alike; use numbers of rows that divide by {k}"
        )
