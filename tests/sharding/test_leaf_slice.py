"""Law: a whole leaf is put together from its slices, and ``runs`` says where each element of a slice lies in the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds.sharding.leaf_slice import LeafSlice, mark_slice, runs, whole_shape


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, list[LeafSlice]]:
    """A whole shape, and a slice along each of some dims."""
    n = draw(st.integers(1, 4))
    shape, found = [], []
    for dim in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["whole", "even", "packed", "heads"]))
        rank = draw(st.integers(0, n - 1))
        if kind == "even":
            cut = LeafSlice.even(dim, n * draw(st.integers(1, 3)), n, rank)
        elif kind == "packed":
            cut = LeafSlice.even(dim, [n * draw(st.integers(1, 2)) for _ in range(draw(st.integers(1, 3)))], n, rank)
        elif kind == "heads":
            count = draw(st.sampled_from([k for k in (1, 2, 3, 4, 6, 8) if k % n == 0 or n % k == 0]))
            cut = LeafSlice.heads(dim, count, draw(st.integers(1, 3)), n, rank)
        else:
            shape.append(draw(st.integers(1, 3)))
            continue
        shape.append(cut.size)
        found.append(cut)
    return tuple(shape), n, found


@pytest.mark.law(50)
@given(cuts(), st.data())
def test_runs_say_where_elements_lie(case: tuple[tuple[int, ...], int, list[LeafSlice]], data: st.DataObject) -> None:
    shape, _, found = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    piece = whole
    for cut in found:
        piece = cut.of(piece)
    assert whole_shape(piece.shape, found) == shape
    start = data.draw(st.integers(0, piece.numel()))
    stop = data.draw(st.integers(start, piece.numel()))
    places, flat = [], whole.view(-1)
    for place, target, length in runs(tuple(piece.shape), found, start, stop):
        assert length > 0
        assert torch.equal(piece.reshape(-1)[place : place + length], flat[target : target + length])
        places += range(place, place + length)
    assert places == list(range(start, stop))


@pytest.mark.law(50)
@given(cuts())
def test_the_whole_leaf_from_all_slices(case: tuple[tuple[int, ...], int, list[LeafSlice]]) -> None:
    shape, n, found = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for cut in found:
        slices = [LeafSlice(cut.dim, cut.size, cut.ranges_by_rank, rank).of(whole) for rank in range(n)]
        assert torch.equal(cut.whole(slices), whole)
        assert sorted(r for first in cut.first_holders for r in cut.ranges_by_rank[first])[0][0] == 0


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="5 along dim 1 does not divide by the 2 ranks"):
        LeafSlice.even(1, [4, 5], 2, 0)
    with pytest.raises(ValueError, match="3 heads along dim 0 and 2 ranks"):
        LeafSlice.heads(0, 3, 4, 2, 0)
    with pytest.raises(ValueError, match="along dim 0 already"):
        mark_slice(mark_slice(torch.ones(2), LeafSlice.even(0, 4, 2, 0)), LeafSlice.even(0, 4, 2, 0))
