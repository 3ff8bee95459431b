"""Blocks of attention are the same by torch's kernels and by the formula, with their log-sum-exps and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import seq
from functional_ds.parallel.sequence import block_attention, blockwise
from functional_ds.parallel.sequence.block_attention import attend, attend_backward, takes
from functional_ds.parallel.sequence.block_products import BlockProduct
from tests.parallel.sequence.attention_cases import TOLERANCES, Case


def _block(rows: int, cols: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(rows * 100 + cols)
    shapes = (4, rows), (2, cols), (2, cols), (4, rows)
    return [torch.randn(2, heads, size, 8, dtype=torch.float64).to(dtype) for heads, size in shapes]


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["full", "causal", "masked"]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_kernels_are_the_formula(rows: int, cols: int, kind: str, dtype: torch.dtype) -> None:
    cols = rows if kind == "causal" else cols
    q, k, v, grad = _block(rows, cols, dtype)
    mask = torch.rand(2, 1, rows, cols) > 0.5 if kind == "masked" else None
    found = attend(q, k, v, scale=0.3, causal=kind == "causal", mask=mask)
    whole = mask if mask is not None else torch.ones(rows, cols, dtype=torch.bool).tril(0 if kind == "causal" else cols)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.3
    scores = scores.masked_fill(~whole, -torch.inf)
    o = scores.softmax(-1).nan_to_num() @ v.double().repeat_interleave(2, 1)
    for one, other in zip(found, (o, scores.logsumexp(-1)), strict=True):
        torch.testing.assert_close(one.double(), other, **TOLERANCES[dtype])
    lse = blockwise.empty_to_infinite(found[1])
    causal = kind == "causal"
    grads = attend_backward(grad, q, k, v, o=found[0], lse=lse, scale=0.3, causal=causal, mask=mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "takes", lambda *_: "formula")
        again = attend(q, k, v, scale=0.3, causal=causal, mask=mask)
        formula = attend_backward(grad, q, k, v, o=again[0], lse=lse, scale=0.3, causal=causal, mask=mask)
    for one, other in zip([*found, *grads], [*again, *formula], strict=True):
        torch.testing.assert_close(one.double(), other.double(), **TOLERANCES[dtype])


def test_which_computes_what() -> None:
    q = torch.ones(1, 2, 4, 8)
    assert takes(q, q, masked=True) == "cpu"
    assert takes(q, q[..., :4], masked=False) == "formula"
    assert takes(q.to("meta"), q.to("meta"), masked=False) == "cpu"


@settings(max_examples=5)
@given(st.sampled_from([(1, 5), (700, 1300), (33, 1025)]))
def test_rows_whose_first_keys_are_all_masked(sizes: tuple[int, int]) -> None:
    """The kernel works through keys in pieces, of which a row may see none."""
    rows, cols = sizes
    q, k, v, _ = _block(rows, cols, torch.float32)
    mask = torch.zeros(1, 1, rows, cols, dtype=torch.bool)
    mask[..., 1:, -1] = True
    o, lse = attend(q, k, v, scale=1.0, mask=mask)
    assert (lse[:, :, 0] == -torch.inf).all()
    assert (o[:, :, 0] == 0).all()
    torch.testing.assert_close(o[:, :, 1:], v[:, :, -1:].repeat_interleave(2, 1).expand(-1, -1, rows - 1, -1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(8, 8), (8, 4)])
def test_long_sequences_make_no_matrix_of_all_scores(
    monkeypatch: pytest.MonkeyPatch, causal: bool, sizes: tuple[int, int]
) -> None:
    """With a mask, and where there is no kernel, rows come in tiles."""
    monkeypatch.setattr(blockwise, "_TILE", 16 * 64)
    largest = 0

    def watched(q: Tensor, k: Tensor, v: Tensor, **rest: object) -> tuple[Tensor, Tensor]:
        nonlocal largest
        largest = max(largest, q.shape[2] * k.shape[2])
        return attend(q, k, v, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(blockwise, "attend", watched)
    documents = (tuple(i // 50 for i in range(128)),) * 2
    case = Case(1, seq.SequenceLayout(), 128, sizes=sizes, causal=causal, documents=documents)
    q, k, v, grad = case.inputs()
    q.requires_grad_()
    o = seq.attention(q, k, v, **case.arguments())
    expected, (d_q, *_) = case.expected()
    torch.testing.assert_close(o.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad((o * grad).sum(), q)[0], d_q)
    assert largest == 16 * 128


def test_tiles_of_a_causal_product_leave_out_what_is_later() -> None:
    tiles = [*BlockProduct((0, 64), (10, 74), "causal").tiles(16 * 64)]
    assert [tile.cols for tile in tiles] == [(10, 26), (10, 42), (10, 58), (10, 74)]
