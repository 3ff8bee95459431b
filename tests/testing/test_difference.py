"""``difference`` is empty if and only if two trees are the same to the bit."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import testing
from functional_ds.base import tree
from tests.planting import Bug, planted

TENSORS = [
    *(torch.tensor(value) for value in (0.0, -0.0, math.nan, 2**60, True)),
    *(torch.tensor([1.0, 2.0]).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64)),
    torch.zeros(0),
    torch.ones(2, 1).T,
]
TREES = testing.trees(st.sampled_from([*TENSORS, 1, "a"]))


def same(a: Any, b: Any) -> bool:
    try:
        testing.assert_same(a, b)
    except AssertionError:
        return False
    return True


@pytest.mark.law
@given(TREES, TREES)
def test_it_is_empty_where_bits_are_equal(a: Any, b: Any) -> None:
    assert not testing.difference(a, tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, a))
    if dict(tree.named(a)).keys() == dict(tree.named(b)).keys() and tree.structure(a) == tree.structure(b):
        assert bool(testing.difference(a, b)) != same(a, b)


CASES = [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), "1 of 2 elements, by at most 2", 1, 2.0),
    (torch.tensor([1, 2]), torch.tensor([3, 5]), "2 of 2 elements, by at most 3", 2, 3.0),
    (torch.tensor([1j]), torch.tensor([1.0 + 0j]), "1 of 1 elements, by at most 1.41421", 1, math.sqrt(2)),
    (torch.tensor(0.0), torch.tensor(-0.0), "the signs of zeros, or bits beyond a double's", 0, 0.0),
    (torch.tensor(2**60), torch.tensor(2**60 + 1), "the signs of zeros, or bits beyond a double's", 0, 0.0),
    (torch.zeros(2), torch.zeros(3), "torch.float32[2] and torch.float32[3]", 0, 0.0),
    (torch.zeros(2), torch.zeros(2).double(), "torch.float32[2] and torch.float64[2]", 0, 0.0),
    (1, 2, "1 and 2", 0, 0.0),
    (torch.zeros(1), 0.0, "tensor([0.]) and 0.0", 0, 0.0),
]


@pytest.mark.parametrize(("x", "y", "what", "elements", "largest"), CASES)
def test_what_it_says(x: Any, y: Any, what: str, elements: int, largest: float) -> None:
    found = testing.difference({"a": x, "b": 1}, {"a": y, "b": 1})
    assert found.leaves == (testing.LeafDifference("a", what, elements, pytest.approx(largest)),)
    assert str(found) == f"a  {what}\n1 leaves are equal"


def test_leaves_of_one_tree_alone() -> None:
    found = testing.difference({"a": 1, "b": 2}, {"b": 2, "c": 3})
    assert [(leaf.path, leaf.what) for leaf in found.leaves] == [("a", "only in the first"), ("c", "only in the second")]
    assert found.equal == 1


BUGS = [
    Bug("values instead of bits", "testing.difference:_compared", "same_bits(x, y)", "torch.equal(x, y)"),
    Bug("the first tree's paths alone", "testing.difference:difference", "[*left, *right]", "[*left]"),
    Bug(
        "a difference with its sign",
        "testing.difference:_compared",
        "(one - other).abs().max()",
        "(one - other).max()",
        Exception,
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_seen(bug: Bug) -> None:
    def checks() -> None:
        test_leaves_of_one_tree_alone()
        for case in CASES:
            test_what_it_says(*case)

    with planted(bug), pytest.raises((AssertionError, bug.shows)):
        checks()
