"""Rows of a batch, along dim 0 of its leaves, and micro-batches, which are some of them."""

from typing import Any

from torch import Tensor

from . import tree

__all__ = ["least_rows", "rows_of", "split"]


def rows_of(batch: Any) -> int:
    """How many rows a batch has: those of its leaf with the fewest, more than one; what has one goes with every row."""
    return min((count for count in _counts(batch) if count > 1), default=least_rows(batch))


def least_rows(batch: Any) -> int:
    """The fewest rows that a leaf of a batch has, one if none has dims: into as many micro-batches it can be cut."""
    return min(_counts(batch), default=1)


def split(batch: Any, k: int, *, uneven: bool = False) -> list[Any]:
    """A batch as k batches of equally many rows; ``uneven``: the first ones may have one more.

    Leaves may have different numbers of rows, several for each of another leaf's; they are cut in proportion.

    Raises:
        ValueError: a leaf has no rows, or too few, or its rows do not divide by k, or not as those of the other leaves do.

    >>> import torch
    >>> [part.tolist() for part in split(torch.arange(5), 2, uneven=True)]
    [[0, 1, 2], [3, 4]]
    >>> [len(pair[1]) for pair in split((torch.arange(5), torch.arange(10)), 2, uneven=True)]
    [6, 4]
    """
    leaves, spec = tree.flatten(batch)
    for path, leaf in tree.named(batch):
        where = f"batch: the leaf at {path or 'the top'!r}"
        if not isinstance(leaf, Tensor) or not leaf.dim():
            raise ValueError(f"{where} has no rows to cut into {k} micro-batches: {leaf!r}")
        if leaf.shape[0] % k and not uneven:
            raise ValueError(
                f"{where} has {leaf.shape[0]} rows, which do not divide into {k} micro-batches; use a multiple of {k} rows on "
                "each rank"
            )
        if leaf.shape[0] < k:
            raise ValueError(f"{where} has {leaf.shape[0]} rows, too few for {k} micro-batches; use at least {k}")
    least = least_rows(batch)
    cuts = [i * (least // k) + min(i, least % k) for i in range(1, k)]
    for path, leaf in tree.named(batch):
        if any(cut * leaf.shape[0] % least for cut in cuts):
            raise ValueError(
                f"batch: the leaf at {path!r} has {leaf.shape[0]} rows and another {least}, which cannot be cut into {k} "
                f"micro-batches alike; use numbers of rows that divide by {k}"
            )
    pieces = [leaf.tensor_split([cut * leaf.shape[0] // least for cut in cuts]) for leaf in leaves]
    return [tree.unflatten(spec, parts) for parts in zip(*pieces, strict=True)]


def _counts(batch: Any) -> list[int]:
    """Dim 0 of its tensors that have dims."""
    return [leaf.shape[0] for leaf in tree.leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
