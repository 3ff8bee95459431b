"""``tiled`` and ``tiled_loss``: what a function of tokens gives, with one tile of what it computes at a time (law 45)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.parallel.sequence.tiling.tiled import tiled
from functional_ds.parallel.sequence.tiling.tiled_loss import tiled_loss


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in fds.tree.leaves(found):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return found


def mlp(params: dict[str, Tensor], x: Tensor, scale: Tensor, key: fds.Key | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Two results of other shapes; draws, where it has a key; an integer result."""
    hidden = F.gelu(x @ params["up"]) * scale[:, :, None]
    if key is not None:
        hidden = key.dropout(hidden, 0.5, "hidden")
    return hidden @ params["down"], {"gate": hidden.sum(-1), "signs": (x[..., 0] > 0).long()}


def inputs(tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Params, x [2, tokens, 3], and a scale for each token."""
    torch.manual_seed(seed)
    params = {"up": torch.randn(3, 8, dtype=dtype), "down": torch.randn(8, 3, dtype=dtype)}
    x, scale = torch.randn(2, tokens, 3, dtype=dtype), torch.rand(2, tokens, dtype=dtype)
    for leaf in (*params.values(), x):
        leaf.requires_grad_()
    return params, x, scale


def gradients(function: Callable[..., Any], *args: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The results, and the gradients of a sum of all of them by params and x."""
    found = fds.tree.leaves(function(*args))
    loss = sum((leaf * torch.linspace(1, 2, leaf.numel()).view(leaf.shape)).sum() for leaf in found if leaf.requires_grad)
    return found, list(torch.autograd.grad(loss, [*args[0].values(), args[1]]))  # type: ignore[arg-type]


@pytest.mark.law(45)
@given(
    tokens=st.integers(1, 7),
    tiles=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    draws=st.booleans(),
    carried=st.booleans(),
)
def test_tiles_change_nothing(tokens: int, tiles: int, dtype: torch.dtype, draws: bool, carried: bool) -> None:
    """tiled(f) = f: every result, the gradients of params and inputs, and draws by a key that may know positions already."""
    params, x, scale = inputs(tokens, dtype)
    key = fds.Key.of(1)
    if carried:
        key = key.at(places={1: (torch.randperm(tokens + 2)[:tokens], tokens + 2)})
    args = (params, x, scale, key) if draws else (params, x, scale)
    found, expected = gradients(tiled(mlp, tiles), *args), gradients(mlp, *args)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(fds.tree.leaves(tiled(mlp, tiles)(*args)), expected[0])


def test_rows_are_tokens_too() -> None:
    """With ``dim=0`` the tokens are rows, and a key counts them."""
    torch.manual_seed(0)
    w, x, key = {"w": torch.randn(3, 4, requires_grad=True)}, torch.randn(5, 3, requires_grad=True), fds.Key.of(2).at(rows=3)

    def product(params: dict[str, Tensor], x: Tensor, key: fds.Key) -> Tensor:
        return key.dropout(x @ params["w"], 0.5, "a")

    torch.testing.assert_close(gradients(tiled(product, 2, dim=0), w, x, key), gradients(product, w, x, key))


def test_generators_draw_again_in_the_backward_pass() -> None:
    """With torch's own dropout the gradient is that of the values that the forward pass gave; later draws are not touched."""
    x = torch.ones(1, 64, 2, requires_grad=True)
    dropped = tiled(lambda params, x: F.dropout(x, 0.5), 4)
    torch.manual_seed(0)
    y = dropped((), x)
    after = torch.get_rng_state()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())
    assert torch.equal(torch.get_rng_state(), after)
    assert 0 < y.count_nonzero() < y.numel()


def test_the_backward_pass_has_the_autocast_of_the_forward() -> None:
    """A tile that is computed again is computed in the same dtype."""
    params, x, _ = inputs(4, torch.float32)
    seen = []

    def noting(params: dict[str, Tensor], x: Tensor) -> Tensor:
        seen.append((x @ params["up"]).dtype)
        return x @ params["up"]

    with torch.autocast("cpu", torch.bfloat16):
        y = tiled(noting, 2)(params, x)
    y.float().sum().backward()
    assert seen == [torch.bfloat16] * 4


def test_sums_over_tiles_are_wide() -> None:
    """Gradients of bf16 params are added up in fp32: 512 tiles that each add 1/256 to 1 do not get lost."""
    w = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    x = torch.full((1, 513, 1), 1 / 256, dtype=torch.bfloat16)
    x[0, 0] = 1
    found = tiled(lambda w, x: fds.Weighted((w * x).sum(), x.numel()), 513, sums=True)(w, x)
    assert (found.sum.item(), found.weight.item()) == (3.0, 513)
    (grad,) = torch.autograd.grad(found.sum, w)
    assert (grad.item(), grad.dtype) == (3.0, torch.bfloat16)


@pytest.mark.parametrize("tiles", [1, 4, 16])
def test_what_is_computed_exists_for_one_tile(tiles: int) -> None:
    """The largest tensor of forward and backward is 1/tiles of the function's."""
    params = {"up": torch.randn(3, 64, requires_grad=True), "down": torch.randn(64, 3, requires_grad=True)}
    x = torch.randn(2, 128, 3, requires_grad=True)
    with Largest() as seen:
        tiled(lambda p, x: F.gelu(x @ p["up"]) @ p["down"], tiles)(params, x).sum().backward()
    assert seen.elements == max(2 * 128 * 64 // tiles, x.numel())


def test_zero_3_gathers_once_for_all_tiles() -> None:
    """The bytes of a step with tiles are those of a step without, in every stage; and the losses are the same."""

    def program(stage: int, tiles: int | None) -> tuple[list[float], int]:
        def block(params: dict[str, Tensor], x: Tensor) -> Tensor:
            return x + F.gelu(x @ params["up"]) @ params["down"]

        run = block if tiles is None else tiled(block, tiles)

        def loss(params: Any, x: Tensor) -> Tensor:
            for layer in params["blocks"]:
                x = run(layer, x)
            return x.square().mean()

        torch.manual_seed(0)
        blocks = [{"up": torch.randn(4, 8) / 2, "down": torch.randn(8, 4) / 2} for _ in range(3)]
        step = T.zero(stage)(fds.train_step(loss, fds.sgd(0.1)))
        state, losses = step.init({"blocks": blocks}), []
        x = torch.linspace(-1, 1, 48).view(2, 6, 4).roll(comm.world().rank, 1)
        with comm.ledger() as seen:
            for _ in range(3):
                state, metrics = step(state, x)
                losses.append(metrics["loss"].item())
        return losses, seen.bytes

    for stage in range(4):
        plain, tiles = (comm.simulate(program, stage, count, world_size=2) for count in (None, 3))
        for (expected, sent), (found, tiled_sent) in zip(plain, tiles, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)  # products of other shapes round otherwise
            assert tiled_sent == sent


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: tiled(mlp, 0), "tiles=0"),
        (lambda x: tiled(mlp, 2, dim=-1), "dim=-1"),
        (lambda x: tiled(mlp, 2)({"w": x}), "no argument after the first has a tensor"),
        (lambda x: tiled(mlp, 2)((), x, x[:, :2]), r"of shape \[2, 2, 3\] has other tokens along dim 1"),
        (lambda x: tiled(lambda p, x: x.sum(), 2)((), x), r"returned float32\[\], and must return tensors with the 2 tokens"),
        (lambda x: tiled(lambda p, x: x, 2, sums=True)((), x), "must return scalars"),
        (
            lambda x: tiled(lambda p, y: y * x[:, :2], 2)((), x.detach()),
            r"uses a tensor of shape \[2, 4, 3\] that requires grad",
        ),
        (lambda x: tiled(lambda p, y: y * x[:, :2], 2)((), x * 2).sum().backward(), "is not one of its arguments"),
    ],
)
def test_what_tiled_refuses(call: Callable[[Tensor], Any], words: str) -> None:
    """Whatever would be cut wrongly, or would get no gradient."""
    with pytest.raises(ValueError, match=words):
        call(torch.ones(2, 4, 3, requires_grad=True))


# -- the loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.law(45)
@given(
    tokens=st.integers(0, 9),
    tiles=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    with_bias=st.booleans(),
    seed=st.integers(0, 5),
)
def test_tiled_loss_is_cross_entropy(
    tokens: int, tiles: int, dtype: torch.dtype, smoothing: float, with_bias: bool, seed: int
) -> None:
    """Value, weight and gradients of F.cross_entropy(logits.float(), ..., reduction="sum"), scaled from outside."""
    torch.manual_seed(seed)
    hidden, weight = torch.randn(2, tokens, 4).to(dtype).requires_grad_(), torch.randn(6, 4).to(dtype).requires_grad_()
    bias = torch.randn(6).to(dtype).requires_grad_() if with_bias else None
    labels = torch.randint(0, 6, (2, tokens))
    labels[torch.rand(2, tokens) < 0.3] = -100
    leaves = [hidden, weight, *([] if bias is None else [bias])]
    wide = torch.promote_types(dtype, torch.float32)
    logits = F.linear(hidden, weight, bias).to(wide).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=smoothing)
    found = tiled_loss(hidden, weight, labels, tiles=tiles, bias=bias, label_smoothing=smoothing)
    assert found.weight.item() == (labels != -100).sum()
    half = dtype in (torch.bfloat16, torch.float16)
    torch.testing.assert_close(found.sum, expected)
    torch.testing.assert_close(
        torch.autograd.grad(8 * found.sum, leaves),
        torch.autograd.grad(8 * expected, leaves),
        rtol=2e-2 if half else None,
        atol=(0.25 if dtype == torch.bfloat16 else 0.03) if half else None,
    )


def test_fp16_gradients_wait_for_the_loss_scale() -> None:
    """softmax over 4096 words is below what fp16 holds; scaled by 2^16, its gradient is not."""
    hidden = torch.ones(1, 1, 2, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(1 << 15, 2, dtype=torch.float16)
    weight[1] = -2.0
    found = tiled_loss(hidden, weight, torch.zeros(1, 1, dtype=torch.int64), tiles=1)
    (grad,) = torch.autograd.grad(found.sum * 2.0**16, hidden)
    assert grad.flatten().tolist() == pytest.approx([-(2.0**17) / (1 << 15) * 0.01831] * 2, rel=1e-2)


@pytest.mark.parametrize("tiles", [1, 2, 8])
def test_logits_exist_for_one_tile(tiles: int) -> None:
    """The largest tensor is 1/tiles of the logits, T V / tiles elements."""
    hidden, weight = torch.randn(2, 64, 4, requires_grad=True), torch.randn(96, 4, requires_grad=True)
    with Largest() as seen:
        tiled_loss(hidden, weight, torch.zeros(2, 64, dtype=torch.int64), tiles=tiles).sum.backward()
    assert seen.elements == 128 * 96 // tiles


def test_no_product_is_computed_twice() -> None:
    """Three products a tile: the logits, and the gradients by states and by weights."""
    hidden, weight = torch.randn(2, 8, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    counter = torch.utils.flop_counter.FlopCounterMode(display=False)
    with counter:
        tiled_loss(hidden, weight, torch.zeros(2, 8, dtype=torch.int64), tiles=4).sum.backward()
    assert counter.get_total_flops() == 3 * 2 * 16 * 4 * 6


def test_tiled_loss_under_zero_and_a_tied_head() -> None:
    """The embedding is the head, in shards, computed in bf16 with fp32 masters: as the untiled loss in every stage."""

    def program(stage: int | None, tiles: int) -> list[float]:
        model = nn.Embedding(12, 4)
        nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
        apply, params = fds.functional(model)

        def loss(params: Any, tokens: Tensor) -> fds.Weighted:
            hidden = apply(params, tokens).cumsum(1).tanh()
            if tiles:
                return tiled_loss(hidden[:, :-1], params["weight"], tokens[:, 1:], tiles=tiles)
            logits = hidden[:, :-1] @ params["weight"].T
            each = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            return fds.Weighted(each, tokens[:, 1:].numel())

        strategy = [T.mixed_precision("bf16")] + ([] if stage is None else [T.zero(stage)])
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.5)))
        state, losses = step.init(params), []
        tokens = torch.arange(24).view(2, 12) * 5 % 12
        for _ in range(3):
            state, metrics = step(state, tokens)
            losses.append(metrics["loss"].item())
        return losses

    expected = program(None, 0)
    assert expected[-1] < expected[0]
    for stage in range(4):
        for found in comm.simulate(program, stage, 5, world_size=2):
            assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tiles": 0}, "tiles=0"),
        ({"tiles": 2, "label_smoothing": 2.0}, "label_smoothing=2.0"),
        ({"tiles": 2, "bias": torch.ones(5)}, r"bias \[5\]"),
        ({"tiles": 2, "labels": torch.zeros(2, 3, dtype=torch.int64)}, r"hidden \[2, 4, 3\], weight \[6, 3\], labels \[2, 3\]"),
    ],
)
def test_what_tiled_loss_refuses(options: dict[str, Any], words: str) -> None:
    """Shapes that do not fit, by name."""
    given = {"labels": torch.zeros(2, 4, dtype=torch.int64), **options}
    with pytest.raises(ValueError, match=words):
        tiled_loss(torch.ones(2, 4, 3), torch.ones(6, 3), **given)
