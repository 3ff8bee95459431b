"""Rows of blocks, cut as evenly as can be."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import pipelining as pp


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_no_cut_is_better(costs: list[int], data: st.DataObject) -> None:
    """max over stages of balanced = min over all cuts of the max."""
    stages = data.draw(st.integers(1, len(costs)))

    def worst(starts: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in zip(starts, (*starts[1:], len(costs)), strict=True))

    found = pp.balanced(costs, stages)
    assert len(found) == stages
    assert found[0] == 0
    assert all(a < b for a, b in pairwise(found))
    assert worst(found) == min(worst((0, *cuts)) for cuts in combinations(range(1, len(costs)), stages - 1))


@given(blocks=st.integers(1, 40), data=st.data())
def test_uniform_stages_differ_by_one(blocks: int, data: st.DataObject) -> None:
    """Sizes differ by at most one and grow."""
    starts = pp.uniformly(blocks, data.draw(st.integers(1, blocks)))
    sizes = [b - a for a, b in zip(starts, (*starts[1:], blocks), strict=True)]
    assert sizes == sorted(sizes)
    assert max(sizes) - min(sizes) <= 1


def test_bad_numbers_are_refused() -> None:
    """Too few blocks, no stage, and costs that are none."""
    with pytest.raises(ValueError, match="2 blocks do not make 3 stages"):
        pp.balanced([1, 1], 3)
    with pytest.raises(ValueError, match="there is at least one"):
        pp.uniformly(3, 0)
    with pytest.raises(ValueError, match=r"costs\[1\] is -1"):
        pp.balanced([1, -1], 1)
