"""Law: the boxes of any range of a flattened slice are its elements in the whole leaf, each once."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds.sharding.leaf_region import Box, LeafRegion, fault, grouped, stretches
from functional_ds.sharding.leaf_slice import LeafSlice
from tests.sharding.test_leaf_slice import cuts


@pytest.mark.law(50)
@given(cuts(), st.data())
def test_boxes_are_the_elements_of_a_slice(case: Any, data: st.DataObject) -> None:
    """Whatever other dims count beside those that are cut."""
    shape, _, found = case
    whole = torch.arange(math.prod(shape)).view(shape)
    piece = whole
    for cut in found:
        piece = cut.of(piece)
    region = LeafRegion.of(tuple(piece.shape), found)
    region.check()
    assert (region.shape, region.numel) == (shape, piece.numel())
    dims = sorted({*region.dims, *data.draw(st.sets(st.integers(0, len(shape) - 1)))})
    start = data.draw(st.integers(0, piece.numel()))
    stop = data.draw(st.integers(start, piece.numel()))
    flat, wide = piece.reshape(-1)[start:stop].clone(), whole.view(grouped(shape, dims))
    found_boxes = list(region.boxes(start, stop, dims))
    assert sum(box.numel for box in found_boxes) == stop - start
    for box in found_boxes:
        where = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        assert torch.equal(box.view(flat, start), wide[where])
        assert torch.equal(box.in_whole(wide.shape).view(whole.reshape(-1)), wide[where])
        for (low, high), a, n in zip(region.bounds(start, stop, dims), box.start, box.shape, strict=True):
            assert low <= a
            assert a + n <= high


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3), st.integers(0, 12), st.integers(1, 40)
)
def test_stretches_are_the_box(dims: list[tuple[int, int]], gap: int, most: int) -> None:
    """In parts of which each is dense enough, and short enough unless it is one element."""
    strides = [1]
    for size, room in reversed(dims[1:]):
        strides.insert(0, strides[0] * size + room)
    box = Box(tuple(0 for _ in dims), tuple(size for size, _ in dims), 0, tuple(strides))
    values, seen = torch.arange(box.extent), []
    for part in stretches(box, gap=gap, most=most):
        own = part.view(values).reshape(-1).tolist()
        seen += own
        assert part.extent == own[-1] - own[0] + 1 <= most
        assert all(b - a - 1 <= gap for a, b in pairwise(own))
    assert seen == box.view(values).reshape(-1).tolist()


@pytest.mark.law(50)
@given(cuts())
def test_all_slices_are_the_whole_leaf(case: Any) -> None:
    """The distinct regions of all ranks cover it once; with one left out, or another beside them, they do not."""
    shape, n, found = case
    piece = torch.empty(shape)
    for cut in found:
        piece = cut.of(piece)
    grid: list[list[LeafSlice]] = [[]]
    for cut in found:
        grid = [[*row, LeafSlice(cut.dim, cut.size, cut.ranges_by_rank, rank)] for row in grid for rank in range(n)]
    regions = list(dict.fromkeys(LeafRegion.of(tuple(piece.shape), row) for row in grid))
    assert fault(shape, regions) is None
    if len(regions) > 1:
        assert "nothing at" in str(fault(shape, regions[1:]))
        assert "overlap" in str(fault(shape, [*regions, LeafRegion(shape)]))


def test_regions_that_cannot_be_are_refused() -> None:
    for ranges in (((1, ((0, 7),)),), ((1, ((3, 3),)),), ((1, ((0, 4), (2, 6))),), ((1, ((4, 2),)),), ((2, ((0, 1),)),)):
        with pytest.raises(ValueError, match=r"ranges of|not dims of"):
            LeafRegion((4, 6), ranges).check()


def test_more_edges_than_any_plan_makes_are_no_plan() -> None:
    """A manifest from elsewhere does not fill the memory."""
    many = tuple((2 * i, 2 * i + 1) for i in range(3000))
    assert "edges" in str(fault((6000, 6000), [LeafRegion((6000, 6000), ((0, many), (1, many)))]))
