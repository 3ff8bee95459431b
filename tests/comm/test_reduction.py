"""Sums in half precision: rows at a time, with the bits of a sum in fp32 of whole copies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds.comm.backends import reduction
from functional_ds.comm.backends.reduction import fold

HALF = (torch.float16, torch.bfloat16)


def _pieces(shape: tuple[int, ...], n: int, dtype: torch.dtype) -> list[Tensor]:
    return list(torch.randn(n, *shape, generator=torch.Generator().manual_seed(0)).to(dtype).unbind())


@pytest.mark.law
@given(
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.integers(1, 4),
    st.sampled_from(HALF),
    st.sampled_from(["sum", "product"]),
    st.sampled_from([None, 0, 1]),
    st.integers(1, 7),
)
def test_rows_at_a_time_give_equal_bits(
    shape: tuple[int, ...], n: int, dtype: torch.dtype, op: str, into: int | None, widened: int
) -> None:
    pieces = _pieces(shape, n, dtype)
    whole = torch.stack(pieces).float()
    expected = pieces[0] if n == 1 else (whole.sum(0) if op == "sum" else whole.prod(0)).to(dtype)
    if n > 2:  # from left to right
        expected = whole[0]
        for other in whole[1:]:
            expected = reduction.OPS[op](expected, other)
        expected = expected.to(dtype)
    out = None if into is None else pieces[min(into, n - 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "_WIDENED", widened)
        total = fold(pieces, op, out=out)
    assert torch.equal(total, expected)
    assert out is None or total is out


@pytest.mark.parametrize("dtype", HALF)
def test_only_some_rows_are_wide_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest copy in fp32 is of so many elements."""
    largest: list[int] = []
    monkeypatch.setattr(reduction, "_WIDENED", 100)
    monkeypatch.setattr(torch.Tensor, "float", lambda x, real=torch.Tensor.float: largest.append(x.numel()) or real(x))
    fold(_pieces((64, 10), 3, dtype), "sum")
    assert max(largest) <= 100
    assert sum(largest) == 640
