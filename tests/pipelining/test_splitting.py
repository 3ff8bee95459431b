"""A backward pass in two parts is the whole one, and computes nothing twice."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from functional_ds.pipelining.estimate import Operations
from functional_ds.pipelining.flight import Flight, Sums
from functional_ds.pipelining.splitting import backward_inputs

LAYERS = ("linear", "norm", "tied", "gate", "conv", "attention", "recomputed", "beside", "plain")


def model(kinds: list[str]) -> tuple[list[Tensor], Any]:
    """Weights and a function of one input of shape [2, 4, 8]."""
    generator = torch.Generator().manual_seed(len(kinds))

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / 2).requires_grad_()

    tied, weights = weight(8, 8), []
    steps: list[Any] = []
    for kind in kinds:
        w, b = weight(8, 8), weight(8)
        weights += [w, b]
        if kind == "linear":
            steps.append(lambda x, w=w, b=b: torch.tanh(F.linear(x, w, b)))
        elif kind == "norm":
            steps.append(lambda x, w=w, b=b: F.layer_norm(x, (8,), w.diagonal(), b))
        elif kind == "tied":
            steps.append(lambda x, b=b: x @ tied + b)
        elif kind == "gate":
            steps.append(lambda x, w=w, b=b: x * torch.sigmoid(x @ w) + (x * b).sum(-1, keepdim=True))
        elif kind == "conv":
            steps.append(lambda x, w=w: F.conv1d(x.transpose(1, 2), w[:, :, None]).transpose(1, 2))
        elif kind == "attention":
            steps.append(lambda x, w=w: F.scaled_dot_product_attention(x @ w, x, x, is_causal=True))
        elif kind == "recomputed":
            steps.append(lambda x, w=w: checkpoint(lambda y: torch.tanh(y @ w), x, use_reentrant=False))
        elif kind == "beside":
            steps.append(lambda x, w=w, b=b: x + (torch.tanh(w) @ b))  # weights alone, joined by an addition
        else:
            steps.append(lambda x: x.sin())
    weights.append(tied)

    def run(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return weights, run


@given(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=5), st.booleans())
def test_both_parts_are_the_whole(kinds: list[str], smooth: bool) -> None:
    """The inputs' gradients, then the weights' = autograd's, up to the order of sums; None where it has none."""
    weights, run = model(kinds)
    x = torch.randn(2, 4, 8, requires_grad=smooth)
    seed = torch.randn(2, 4, 8)
    y = run(x)
    if not y.requires_grad:
        return
    inputs = [x] if smooth else []
    expected = torch.autograd.grad([y], [*inputs, *weights], [seed], allow_unused=True)
    found, rest = backward_inputs([run(x)], [seed], inputs, weights)
    for ours, theirs in zip([*found, *rest.run()], expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_no_product_is_computed_twice() -> None:
    """The products of both parts are those of the whole, and half of a linear layer's are in each."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(3)))
    x, weights = torch.randn(4, 8, requires_grad=True), list(layers.parameters())

    def flops(*parts: Any) -> list[int]:
        counts = []
        for part in parts:
            with Operations() as counter:
                part()
            counts.append(counter.total)
        return counts

    y, seed = layers(x), torch.ones(4, 8)
    whole = flops(lambda: torch.autograd.grad([layers(x)], [x, *weights], [seed]))[0] - flops(lambda: layers(x))[0]
    rest: list[Any] = []
    first = flops(lambda: rest.append(backward_inputs([y], [seed], [x], weights)[1]))[0]
    second = flops(rest[0].run)[0]
    assert (first, second) == (whole // 2, whole // 2)


def test_without_inputs_everything_is_left_for_later() -> None:
    w = torch.ones(2, requires_grad=True)
    found, rest = backward_inputs([w * 3], [torch.ones(2)], [], [w])
    assert (found, rest.grads) == ([], [None])
    assert torch.equal(rest.run()[0], torch.full((2,), 3.0))


def test_a_flight_gives_zeros_for_an_input_that_nothing_depends_on() -> None:
    x, y, w = (torch.ones(2, requires_grad=True) for _ in range(3))
    back, grads = Flight.of([x, y], [x * w]).backward([torch.ones(2)], [w])
    assert [grad.tolist() for grad in (*back, *grads)] == [[1, 1], [0, 0], [1, 1]]
    with pytest.raises(RuntimeError, match="comes after that for inputs"):
        Flight.of([], []).backward_weights()


@given(st.lists(st.lists(st.none() | st.integers(-8, 8), min_size=2, max_size=2), min_size=1, max_size=4), st.booleans())
def test_sums_own_what_they_write_to(lists: list[list[int | None]], half: bool) -> None:
    """Σ of the lists; none of the gradients that were given is written to; half-precision sums grow in fp32."""
    dtype = torch.bfloat16 if half else torch.float32
    given_ = [[None if value is None else torch.full((3,), value, dtype=dtype) for value in each] for each in lists]
    sums = Sums(len(lists))
    for each in given_:
        sums.add(each)
    for column, total in enumerate(sums.grads):
        values = [each[column] for each in lists if each[column] is not None]
        assert (total is None) == (not values)
        if total is not None:
            assert total.tolist() == [float(sum(values))] * 3
            assert total.dtype == (torch.float32 if half and len(lists) > 1 else dtype)
    for each, values in zip(given_, lists, strict=True):
        assert all(tensor is None or tensor.tolist() == [value] * 3 for tensor, value in zip(each, values, strict=True))
