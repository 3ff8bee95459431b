"""Layouts are permutations of positions (law 44)."""

import pytest
import torch
from hypothesis import given

from functional_ds import seq
from tests.parallel.sequence.attention_cases import layouts

Layout = seq.SequenceLayout


@pytest.mark.law(44)
@given(layouts(most=6))
def test_ranks_hold_each_position_once_and_equally_many(drawn: tuple[int, seq.SequenceLayout, int]) -> None:
    ranks, layout, length = drawn
    pieces = [layout.positions(length, ranks, rank) for rank in range(ranks)]
    assert {piece.numel() for piece in pieces} == {length // ranks}
    assert all(piece.dtype == torch.int64 for piece in pieces)
    order = layout.order(length, ranks)
    assert torch.equal(order, torch.cat(pieces))
    assert torch.equal(order.sort().values, torch.arange(length))
    x = torch.randn(3, length)
    whole = torch.cat(x.index_select(1, order).chunk(ranks, 1), 1).index_select(1, layout.inverse(length, ranks))
    assert torch.equal(whole, x)
    assert [p for rank in range(ranks) for run in layout.runs(length, ranks, rank) for p in run] == order.tolist()


@given(layouts(most=6))
def test_each_rank_holds_its_positions_in_ascending_runs(drawn: tuple[int, seq.SequenceLayout, int]) -> None:
    ranks, layout, length = drawn
    for rank in range(ranks):
        positions = layout.positions(length, ranks, rank)
        assert bool((positions.diff() > 0).all())


def test_the_names() -> None:
    assert [Layout("contiguous").positions(8, 2, r).tolist() for r in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [Layout("zigzag").positions(8, 2, r).tolist() for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [Layout("striped").positions(8, 2, r).tolist() for r in (0, 1)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    documents = Layout.per_document([8, 5, 3])
    assert [documents.positions(16, 2, r).tolist() for r in (0, 1)] == [
        [0, 1, 6, 7, 8, 11, 12, 13],
        [2, 3, 4, 5, 9, 10, 14, 15],
    ]
    assert Layout.of("zigzag") == Layout("zigzag")
    assert Layout.of(documents) is documents


def test_an_inner_cut_is_ulysses_inside_of_a_ring() -> None:
    outer = Layout("zigzag")
    for rank in range(6):
        shared = outer.positions(24, 3, rank // 2).chunk(2)[rank % 2]
        assert torch.equal(Layout("zigzag", inner=2).positions(24, 6, rank), shared)


@pytest.mark.parametrize(
    ("kind", "ranks", "length", "missing"), [("zigzag", 4, 13, 3), ("contiguous", 3, 10, 2), ("striped", 2, 4, 0)]
)
def test_padding_is_what_is_missing(kind: str, ranks: int, length: int, missing: int) -> None:
    assert Layout(kind).padding(length, ranks) == missing
    Layout(kind).check(length + missing, ranks)


def test_padding_is_a_document_of_its_own() -> None:
    layout = Layout.per_document([5, 4])
    assert layout.padding(9, 4) == 3
    assert layout.extended(3).documents == (5, 4, 3)
    assert layout.extended(0) is layout
    assert Layout("zigzag").extended(3) == Layout("zigzag")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Layout("zigzag").positions(12, 4, 0), r"12 positions .* 4 ranks .*'zigzag'.* multiple of 8; append 4"),
        (lambda: Layout("contiguous").positions(7, 2, 0), r"7 positions .* multiple of 2; append 1"),
        (lambda: Layout("zigzag", inner=2).positions(12, 3, 0), r"inner=2.* does not divide the 3 ranks"),
        (lambda: Layout.per_document([3, 4]).positions(8, 2, 0), r"documents of 7 positions together, and the sequence has 8"),
        (lambda: Layout.per_document([3, 0]), r"a length is less than 1"),
        (lambda: Layout("per_document"), r"takes lengths"),
        (lambda: Layout("zigzag", documents=(3,)), r"takes lengths"),
        (lambda: Layout("zig-zag"), r"zig-zag"),
    ],
)
def test_what_does_not_fit_is_refused(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]
