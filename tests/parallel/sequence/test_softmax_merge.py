"""Merging partial softmaxes is associative and commutative, and attention to no key is its identity (law 43)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds.parallel.sequence.blockwise import merge

Partial = tuple[Tensor, Tensor]


def _merged(one: Partial, other: Partial) -> Partial:
    return merge(*one, other[0], other_lse=other[1])


def _close(one: Partial, other: Partial) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@st.composite
def partials(draw: st.DrawFn) -> list[Partial]:
    numbers = st.floats(-30, 30) | st.just(-torch.inf)
    found = []
    for _ in range(3):
        lse = torch.tensor(draw(st.lists(numbers, min_size=4, max_size=4)), dtype=torch.float64)
        o = torch.tensor(draw(st.lists(st.floats(-2, 2), min_size=4, max_size=4)), dtype=torch.float64).unsqueeze(-1)
        found.append((o.masked_fill((lse == -torch.inf).unsqueeze(-1), 0), lse))
    return found


@pytest.mark.law(43)
@given(partials())
def test_merging_is_associative_commutative_and_has_an_identity(parts: list[Partial]) -> None:
    a, b, c = parts
    _close(_merged(_merged(a, b), c), _merged(a, _merged(b, c)))
    _close(_merged(a, b), _merged(b, a))
    none = torch.zeros_like(a[0]), torch.full_like(a[1], -torch.inf)
    _close(_merged(a, none), a)
    _close(_merged(none, a), a)
    assert not any(x.isnan().any() for x in _merged(none, none))


@given(st.integers(1, 7), st.integers(1, 7))
def test_merged_parts_are_the_softmax_over_all(first: int, second: int) -> None:
    scores, values = (
        torch.randn(5, first + second, dtype=torch.float64) * 20,
        torch.randn(first + second, 3, dtype=torch.float64),
    )

    def part(cols: slice) -> Partial:
        return scores[:, cols].softmax(-1) @ values[cols], scores[:, cols].logsumexp(-1)

    _close(_merged(part(slice(first)), part(slice(first, None))), part(slice(None)))


def test_what_is_merged_is_not_changed() -> None:
    a, b = (torch.ones(2, 1), torch.zeros(2)), (torch.zeros(2, 1), torch.ones(2))
    _merged(a, b)
    _close(a, (torch.ones(2, 1), torch.zeros(2)))


def test_not_a_number_stays_visible() -> None:
    bad = torch.full((1, 1), torch.nan), torch.zeros(1)
    assert _merged(bad, (torch.ones(1, 1), torch.ones(1)))[0].isnan().all()
