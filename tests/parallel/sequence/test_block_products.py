"""The products that an attention computes are the pairs that its mask allows, each once."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import seq
from functional_ds.parallel.sequence.block_products import products
from tests.parallel.sequence.attention_cases import layouts, pairs_of


def _document(position: int, documents: tuple[int, ...] | None) -> int:
    return sum(end <= position for end in itertools.accumulate(documents or ()))


@pytest.mark.law(43)
@given(layouts(), st.booleans(), st.none() | st.integers(1, 12), st.integers(1, 64), st.booleans())
def test_products_are_the_allowed_pairs_each_once(
    drawn: tuple[int, seq.SequenceLayout, int], causal: bool, window: int | None, elements: int, sorted_keys: bool
) -> None:
    ranks, layout, length = drawn
    window = window if causal else None
    documents = layout.documents
    runs = [layout.runs(length, ranks, rank) for rank in range(ranks)]
    for rows, cols in itertools.product(runs, [(range(length),)] if sorted_keys else runs):
        allowed = {
            (i, j)
            for i, a, j, b in pairs_of(rows, cols)
            if (not causal or a >= b)
            and (window is None or a - b < window)
            and _document(a, documents) == _document(b, documents)
        }
        found = []
        for product in products(rows, cols, causal=causal, window=window, documents=documents):
            pairs = 0
            for tile in product.tiles(elements):
                for pair in itertools.product(range(*tile.rows), range(*tile.cols)):
                    pairs += 1
                    if pair in allowed or tile.kind != "masked":
                        found.append(pair)
            assert product.pairs <= pairs
        assert sorted(found) == sorted(allowed)


@given(st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(1, 6), st.integers(1, 4))
def test_nothing_is_masked_where_there_is_no_window(kind: str, ranks: int, times: int) -> None:
    """So every product is one call of a kernel without a mask."""
    layout = seq.SequenceLayout(kind)
    length = layout.multiple(ranks) * times
    runs = [layout.runs(length, ranks, rank) for rank in range(ranks)]
    for rows, cols in itertools.product(runs, runs):
        found = products(rows, cols, causal=True)
        assert all(product.kind in ("full", "causal") for product in found)
        assert len(found) <= 2


@pytest.mark.law(44)
@given(st.integers(1, 8), st.integers(1, 8))
def test_zigzag_is_equal_on_all_ranks_in_every_step(ranks: int, times: int) -> None:
    length = 2 * ranks * times
    steps = seq.ring_pairs("zigzag", length, ranks=ranks)
    assert all(len(set(step)) == 1 for step in steps)
    assert sum(map(sum, steps)) == length * (length + 1) // 2


@given(st.integers(1, 8), st.integers(1, 8))
def test_documents_in_zigzag_are_equal_where_they_divide(ranks: int, times: int) -> None:
    documents = [2 * ranks * times, 4 * ranks * times, 2 * ranks]
    layout = seq.SequenceLayout.per_document(documents)
    steps = seq.ring_pairs(layout, sum(documents), ranks=ranks)
    assert all(len(set(step)) == 1 for step in steps)
    assert sum(map(sum, steps)) == sum(size * (size + 1) // 2 for size in documents)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_contiguous_uses_half_of_the_machine(ranks: int) -> None:
    """The share of time in which ranks compute tends to P / (2P - 1), as pieces grow."""
    size = 4096
    steps = seq.ring_pairs("contiguous", size * ranks, ranks=ranks)
    share = sum(map(sum, steps)) / (ranks * sum(max(step) for step in steps))
    assert share == pytest.approx(ranks / (2 * ranks - 1), rel=1e-3)
    striped = seq.ring_pairs("striped", size * ranks, ranks=ranks)
    work = [sum(step[rank] for step in striped) for rank in range(ranks)]
    assert max(work) - min(work) == (ranks - 1) * size


def test_full_attention_is_one_product_a_step() -> None:
    for kind in ("contiguous", "zigzag", "striped"):
        runs = [seq.SequenceLayout(kind).runs(16, 4, rank) for rank in range(4)]
        assert [len(products(runs[0], other, causal=False)) for other in runs] == [1] * 4
