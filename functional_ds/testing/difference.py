"""Differences between two states, or any two pytrees."""

from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.comm.record.notebook import html_text

from .same import same_bits


@attrs.frozen
class LeafDifference:
    """Two leaves that differ.

    Attributes:
        path: their path.
        what: how they differ, as text.
        elements: how many elements differ, if shapes and dtypes are equal.
        largest: the largest absolute difference between elements; NaN if one of the two is NaN.
    """

    path: str
    what: str
    elements: int = 0
    largest: float = 0.0


@attrs.frozen
class Difference:
    """The leaves that differ, which print as a table; false if there are none.

    Attributes:
        leaves: the differences, in the order of the trees.
        equal: how many leaves are equal.
    """

    leaves: tuple[LeafDifference, ...]
    equal: int

    def __bool__(self) -> bool:
        return bool(self.leaves)

    def __str__(self) -> str:
        width = max((len(leaf.path) for leaf in self.leaves), default=0)
        return "\n".join([f"{leaf.path:<{width}}  {leaf.what}" for leaf in self.leaves] + [f"{self.equal} leaves are equal"])

    def _repr_html_(self) -> str:
        return html_text(self)


def difference(a: Any, b: Any) -> Difference:
    """Compares two pytrees, such as two training states, bitwise.

    Law: the result is empty iff the trees have the same paths, with equal dtypes, shapes and bits.

    For sharded states it compares this rank's shards; to compare whole tensors, pass ``step.params(state)``.

    >>> a = {"w": torch.tensor([1.0, 2.0]), "b": torch.zeros(3), "step": torch.tensor(1)}
    >>> print(difference(a, {"w": torch.tensor([1.0, 2.5]), "b": torch.zeros(2), "step": torch.tensor(1)}))
    b  torch.float32[3] and torch.float32[2]
    w  1 of 2 elements, by at most 0.5
    1 leaves are equal
    """
    left, right = dict(tree.named(a)), dict(tree.named(b))
    absent = object()
    pairs = [(path, left.get(path, absent), right.get(path, absent)) for path in dict.fromkeys([*left, *right])]
    differences = [
        LeafDifference(path, f"only in the {'second' if x is absent else 'first'}")
        if absent in (x, y)
        else _compared(path, x, y)
        for path, x, y in pairs
    ]
    return Difference(tuple(leaf for leaf in differences if leaf is not None), sum(leaf is None for leaf in differences))


def _compared(path: str, x: Any, y: Any) -> LeafDifference | None:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        same = type(x) is type(y) and bool(x == y)
        return None if same else LeafDifference(path, f"{x!r} and {y!r}")
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return LeafDifference(path, f"{x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}")
    if same_bits(x, y):
        return None
    wide = torch.complex128 if x.is_complex() else torch.float64
    one, other = x.detach().cpu().to(wide), y.detach().cpu().to(wide)
    unequal = int((one != other).sum())
    if not unequal:
        return LeafDifference(path, "the signs of zeros, or bits beyond a double's")
    largest = float((one - other).abs().max())
    return LeafDifference(path, f"{unequal} of {x.numel()} elements, by at most {largest:g}", unequal, largest)
