"""What a forward pass keeps, with values and without."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds.memory import activations, without_values
from tests.transforms.models import CASES

WITHOUT_VALUES = sorted(set(CASES) - {"branching", "recurrent"})  # reads values; takes other kernels on the CPU


@pytest.mark.sample(4)
@pytest.mark.law(20)
@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_predicted_is_measured(name: str) -> None:
    """Fake tensors keep as many bytes as those with values; and as each other, whatever ran before."""
    params, loss = CASES[name].make()
    batch = CASES[name].batch(8)
    found = activations(loss, params, batch)
    assert found.kept > 0
    assert found.kept <= found.forward
    for _ in range(2):
        assert activations(loss, without_values(params), without_values(batch)).kept == found.kept


def test_each_layer_keeps_what_its_derivative_needs() -> None:
    """tanh its result; a product its factors, params and batch apart; a sum nothing. The loss itself is not counted."""
    w, x = torch.ones(16, 16), torch.ones(4, 16)

    def loss(params: Any, batch: Tensor) -> Tensor:
        hidden = torch.tanh(batch @ params["a"])  # [4, 16], kept by tanh and by the next product
        return (hidden @ params["b"]).sum()

    assert activations(loss, {"a": w, "b": w.clone()}, x).kept == 4 * 16 * 4
    assert (
        activations(lambda params, batch: F.linear(batch, params["a"]).sum(), {"a": w}, x).kept == 0
    )  # a view of w is no more


@pytest.mark.law(20)
@pytest.mark.parametrize("order", ["first measured", "first predicted"])
def test_buffers_are_no_activations(order: str) -> None:
    """Whether a module copies them in this pass, reads a view of them, or writes them."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 10), nn.BatchNorm1d(10)
            self.register_buffer("mask", torch.ones(100, 100))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.norm(self.linear(x))) * self.mask[0, :10]

    apply, params = fds.functional(Masked())
    held = {"measured": (params, torch.randn(8, 4)), "predicted": without_values((params, torch.randn(8, 4)))}
    ways = ["measured", "predicted", "measured", "predicted"][order == "first predicted" :]
    found = [activations(lambda p, x: apply(p, x).sum(), *held[way]) for way in ways]
    assert [one.kept for one in found] == [2 * 8 * 10 * 4 + 2 * 10 * 4] * len(ways)  # two results, and what the norm keeps
    assert all(one.kept <= one.forward < 4 * 100 * 100 and 0 < one.backward < 4 * 100 * 100 for one in found)


def test_recomputation_counts_as_what_it_leaves() -> None:
    """A checkpointed layer leaves its input."""
    x = torch.ones(4, 16)

    def layer(hidden: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(torch.tanh(hidden @ w)))

    def loss(params: Any, batch: Tensor, recompute: bool) -> Tensor:
        for w in params:
            batch = checkpoint(layer, batch, w, use_reentrant=False) if recompute else layer(batch, w)
        return batch.sum()

    params = [torch.eye(16) for _ in range(3)]
    plain = activations(lambda p, b: loss(p, b, False), params, x)
    less = activations(lambda p, b: loss(p, b, True), params, x)
    assert plain.kept == 9 * x.nbytes
    assert less.kept == 2 * x.nbytes  # the first layer's input is the batch, and nobody needs the last one's result
    bare = activations(lambda p, b: loss(p, b, True), without_values(params), without_values(x))
    assert bare.kept == less.kept


def test_half_precision_keeps_half() -> None:
    """In an autocast products are bf16, and params are cast, which is kept."""
    w, x = {"w": torch.ones(32, 32)}, torch.ones(4, 32)
    wide = activations(lambda p, b: F.gelu(b @ p["w"]).sum(), w, x)
    half = activations(lambda p, b: F.gelu(b @ p["w"]).sum(), w, x, autocast=torch.bfloat16)
    assert wide.kept == 4 * 32 * 4
    assert half.kept == 4 * 32 * 2 + 4 * 32 * 2  # the batch's copy, and gelu's input; params need no copy for what they give
    bare = activations(lambda p, b: F.gelu(b @ p["w"]).sum(), without_values(w), without_values(x), autocast=torch.bfloat16)
    assert bare.kept == half.kept


def test_other_losses() -> None:
    """Weighted losses and metrics beside them; frozen leaves get no gradients; a loss that is no scalar is refused."""
    params = fds.freeze({"w": torch.ones(8), "frozen": torch.ones(8)}, "frozen")

    def loss(p: Any, batch: Tensor) -> Any:
        return fds.Weighted((p["w"].exp() * p["frozen"] * batch).sum(), 3.0), {"metric": batch.sum()}

    assert activations(loss, params, torch.ones(8)).kept == 32  # exp's result
    with pytest.raises(ValueError, match="the loss must be a scalar"):
        activations(lambda p, b: p["w"] * b, params, torch.ones(8))


def test_what_a_backward_pass_leaves_is_not_taken_from_the_forwards_peak() -> None:
    """The peak of the forward pass is at least what is kept at its end, whatever a backward pass stores for good."""
    stored: list[Tensor] = []

    class Stores(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            stored.append(torch.zeros(1000) + 1)
            return grads[0]

    found = activations(
        lambda params, x: Stores.apply(torch.tanh(x @ params["w"])).sum(), {"w": torch.ones(4, 4)}, torch.ones(2, 4)
    )
    assert found.kept == 2 * 4 * 4 <= found.forward
