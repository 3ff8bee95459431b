"""A backward pass in two parts is the whole one, and computes nothing twice."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from functional_ds.dry_run.operations import OperationCounter
from functional_ds.pipelining.execution.split_backward import InFlightMicroBatch, accumulate, backward_inputs

LAYERS = ("linear", "norm", "tied", "gate", "conv", "attention", "recomputed", "beside", "plain", "hooked", "prehooked")


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
        elif kind == "hooked":
            steps.append(lambda x, w=w, b=b: _tripled(F.linear(x, w, b)).sin())
        elif kind == "prehooked":
            steps.append(lambda x, b=b: _node_tripled(x * b).sin())
        else:
            steps.append(lambda x: x.sin())
    weights.append(tied)

    def run(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return weights, run


def _tripled(y: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad * 3)
    return y


def _node_tripled(y: Tensor) -> Tensor:
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda grads: (grads[0] * 3,))
    return y


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
    backward_inputs([run(x)], [seed], inputs, weights).run()
    for leaf, theirs in zip([*inputs, *weights], expected, strict=True):
        assert (leaf.grad is None) == (theirs is None)
        if leaf.grad is not None and theirs is not None:
            torch.testing.assert_close(leaf.grad, theirs, rtol=1e-5, atol=1e-6)


def test_no_product_is_computed_twice() -> None:
    """The products of both parts are those of the whole, and half of a linear layer's are in each."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(3)))
    x, weights = torch.randn(4, 8, requires_grad=True), list(layers.parameters())

    def flops(*parts: Any) -> list[int]:
        counts = []
        for part in parts:
            with OperationCounter() as counter:
                part()
            counts.append(counter.flops)
        return counts

    y, seed = layers(x), torch.ones(4, 8)
    whole = flops(lambda: accumulate([layers(x)], [seed], [x, *weights]))[0] - flops(lambda: layers(x))[0]
    rest: list[Any] = []
    first = flops(lambda: rest.append(backward_inputs([y], [seed], [x], weights)))[0]
    second = flops(rest[0].run)[0]
    assert (first, second) == (whole // 2, whole // 2)


def test_without_inputs_everything_is_left_for_later() -> None:
    w = torch.ones(2, requires_grad=True)
    rest = backward_inputs([w * 3], [torch.ones(2)], [], [w])
    assert w.grad is None
    rest.run()
    rest.run()
    assert torch.equal(w.grad, torch.full((2,), 3.0))


def test_a_flight_gives_zeros_for_an_input_that_nothing_depends_on() -> None:
    x, y, w = (torch.ones(2, requires_grad=True) for _ in range(3))
    back = InFlightMicroBatch.of([x, y], [x * w]).backward([torch.ones(2)], [w])
    assert [grad.tolist() for grad in (*back, w.grad)] == [[1, 1], [0, 0], [1, 1]]
    with pytest.raises(RuntimeError, match="comes after that for inputs"):
        InFlightMicroBatch.of([], []).backward_weights()


def test_a_gradient_that_is_retained_is_counted_once() -> None:
    x, w = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    y = x * w
    y.retain_grad()
    backward_inputs([y * 5], [torch.ones(1)], [x], [w]).run()
    assert [leaf.grad.item() for leaf in (x, w, y)] == [15.0, 10.0, 5.0]  # type: ignore[union-attr]


JOINED = ("a", "b.view", "a + b.view", "a.expand", "b[0]", "x alone")


@given(st.lists(st.sampled_from(JOINED), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_sums_share_no_memory(kinds: list[str], microbatches: int, parts: bool) -> None:
    """Σ over micro-batches by each weight, though autograd gives the same memory as the gradients of several leaves."""
    a, b = torch.zeros(4, requires_grad=True), torch.zeros(2, 2, requires_grad=True)
    given_: list[Tensor] = []
    expected: list[list[Tensor | None]] = []
    for j in range(microbatches):
        x, seed = torch.zeros(4, requires_grad=True), torch.full((4,), j + 1.0)

        def run(x: Tensor) -> Tensor:
            for kind in kinds:
                more = {"a": a, "b.view": b.view(4), "a + b.view": a + b.view(4), "a.expand": a[:1].expand(4)}
                x = x + {**more, "b[0]": torch.cat([b[0], b[1]]), "x alone": x}[kind]
            return x

        expected.append(list(torch.autograd.grad([run(x)], [x, a, b], [seed], allow_unused=True)))
        flight = InFlightMicroBatch.of([x], [run(x)])
        if parts:
            given_ += flight.backward_inputs([seed.clone()], [a, b])
            flight.backward_weights()
        else:
            given_ += flight.backward([seed.clone()], [a, b])
    for leaf, grads in zip((a, b), list(zip(*expected, strict=True))[1:], strict=True):
        known = [grad for grad in grads if grad is not None]
        assert (leaf.grad is None) == (not known)
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, torch.stack(known).sum(0))
    for back, grads in zip(given_, expected, strict=True):  # gradients that were sent are not written to
        assert torch.equal(back, grads[0])  # type: ignore[arg-type]
