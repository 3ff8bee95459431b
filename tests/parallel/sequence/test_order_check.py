"""In a first step over sequences, what acts along a rank's piece beside attention is refused, and what is right passes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, seq
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.parallel.sequence.axis import sequence_axis

WORDS, WIDTH = 12, 8
TOKENS = torch.randint(WORDS, (2, 16), generator=torch.Generator().manual_seed(0))
Layer = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]  # of params, states [rows, positions, WIDTH] and position_ids


def _attention(turn: Callable[[Tensor, Tensor], Tensor] | None = None, attend: Any = None) -> Layer:
    """A causal attention of two heads, whose queries and keys are turned by their positions."""

    def layer(params: dict[str, Tensor], x: Tensor, at: Tensor) -> Tensor:
        q, k, v = (x @ params["qkv"]).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        q, k = (each if turn is None else turn(each, at) for each in (q, k))
        return x + (attend or seq.ring())(q, k, v, causal=True).transpose(1, 2).flatten(2)

    return layer


def _rotary(x: Tensor, at: Tensor) -> Tensor:
    angle = at[:, None, :, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
    a, b = x.unflatten(-1, (2, -1)).unbind(-1)
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


def _here(at: Tensor) -> Tensor:
    """Positions as a model counts them that does not know of other ranks."""
    return torch.arange(at.shape[1])[None]


def _run(
    layer: Layer,
    *,
    shifts: bool = False,
    ranks: int = 2,
    length: int = 16,
    dtype: str | None = None,
    keyed: bool = False,
    silent: bool = False,
    narrow: bool = False,
    **options: Any,
) -> None:
    """Two steps: of a loss that draws, if it is keyed; where the head begins as zeros, if it is silent; narrow: a half sum."""

    def of(params: dict[str, Tensor], batch: dict[str, Tensor], key: Any = None) -> fds.Weighted:
        x = layer(params, params["words"][batch["input_ids"]], batch["position_ids"])
        x = x if key is None else key.dropout(x, 0.5, "x") + key.uniform(x, "noise")
        logits, labels = x @ params["head"].T, batch["shift_labels"]
        if shifts:
            logits, labels = logits[:, :-1], batch["input_ids"][:, 1:]
        logits = logits if narrow else logits.float()
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return fds.Weighted(each, (labels != -100).sum())

    def with_key(params: dict[str, Tensor], batch: dict[str, Tensor], key: Any) -> fds.Weighted:
        return of(params, batch, key.at())  # there must be one

    def without(params: dict[str, Tensor], batch: dict[str, Tensor]) -> fds.Weighted:
        return of(params, batch)

    def program() -> None:
        torch.manual_seed(0)
        params = {"words": torch.randn(WORDS, WIDTH), "at": torch.randn(16, WIDTH), "qkv": torch.randn(WIDTH, 3 * WIDTH)}
        params["kernel"] = torch.randn(WIDTH, WIDTH, 2) / 9
        params["head"] = torch.zeros(WORDS, WIDTH) if silent else params["words"].clone()
        strategy = [*([T.mixed_precision(dtype)] if dtype else []), T.zero(3), T.sequence(**options)]
        step = fds.compose(*strategy)(fds.train_step(with_key if keyed else without, fds.sgd(0.01)))
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, {"input_ids": TOKENS[:, :length], "labels": TOKENS[:, :length]})

    comm.simulate(program, world_size=ranks)


def _table(at: Callable[[Tensor], Tensor]) -> Layer:
    return lambda params, x, given: _attention()(params, x + params["at"][at(given)], given)


def _convolution(params: dict[str, Tensor], x: Tensor, at: Tensor) -> Tensor:
    return F.conv1d(F.pad(_attention()(params, x, at).mT, (1, 0)), params["kernel"]).mT


WRONG = {
    "positions in a table": (_table(_here), {}),
    "rotary positions": (_attention(lambda x, at: _rotary(x, _here(at))), {}),
    "a convolution": (_convolution, {}),
    "a convolution alone": (lambda params, x, at: F.conv1d(F.pad(x.mT, (1, 0)), params["kernel"]).mT, {"tokenwise": True}),
    "two tokens on a rank": (_table(_here), {"length": 4}),
    "shifted labels": (_attention(), {"shifts": True}),
    "in half precision": (_convolution, {"dtype": "bf16", "layout": "zigzag"}),
    "a little, in a bf16 sum": (lambda params, x, at: _convolution(params, x, at) / 50, {"dtype": "bf16", "narrow": True}),
    "rotary positions and draws": (_attention(lambda x, at: _rotary(x, _here(at))), {"keyed": True}),
    "behind a head of zeros": (_convolution, {"silent": True}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_acts_along_a_piece_is_refused(name: str) -> None:
    layer, options = WRONG[name]
    with pytest.raises(ValueError, match=r"where tokens change their places within a rank.*something else acts along"):
        _run(layer, **options)


def _within_groups() -> Any:
    """A ring over the step's ranks that knows nothing of the step's documents."""
    axis = sequence_axis("a test")
    return seq.ring(axis.group, layout=axis.layout)


OWN = torch.arange(16)[None] // 4  # documents that the caller gives
RIGHT = {
    "positions of the batch": (_table(lambda at: at), {}),
    "no positions": (_attention(), {"layout": "striped"}),
    "rotary positions": (_attention(_rotary, seq.gathered()), {"dtype": "bf16"}),
    "documents of its own": (_attention(_rotary, lambda *qkv, causal: seq.ring()(*qkv, causal=causal, documents=OWN)), {}),
    "another attention": (_attention(None, seq.ulysses(lambda q, k, v, causal: v.cumsum(2))), {}),
    "groups of its own": (_attention(_rotary, lambda *qkv, causal: _within_groups()(*qkv, causal=causal)), {}),
    "a token on each rank": (_table(lambda at: at), {"length": 2}),
    "draws": (_attention(_rotary), {"keyed": True, "layout": "zigzag"}),
    "a head of zeros": (_attention(_rotary), {"silent": True}),
    "a sum in bf16": (_attention(_rotary), {"dtype": "bf16", "narrow": True}),
    "a sum in fp16": (_table(lambda at: at), {"dtype": "fp16", "narrow": True, "layout": "zigzag"}),
    "a window of two": (_attention(_rotary, functools.partial(seq.ring(), window=2)), {}),
    "a window of three": (_attention(_rotary, functools.partial(seq.gathered(), window=3)), {"layout": "zigzag"}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_models_pass(name: str) -> None:
    layer, options = RIGHT[name]
    _run(layer, **options)


@pytest.mark.parametrize("keyed", [False, True])
def test_a_mean_over_positions_is_refused_with_a_key_too(keyed: bool) -> None:
    """A mean over positions is no sum over tokens."""

    def of(params: dict[str, Tensor], batch: dict[str, Tensor], key: Any = None) -> fds.Weighted:
        x = _attention()(params, params["words"][batch["input_ids"]], batch["position_ids"])
        x = x if key is None else key.dropout(x, 0.1, "x")
        return fds.Weighted(x.mean(1).square().sum(), torch.tensor(float(len(x))))

    def plain(params: dict[str, Tensor], batch: dict[str, Tensor]) -> fds.Weighted:
        return of(params, batch)

    def program() -> None:
        step = fds.compose(T.zero(0), T.sequence())(fds.train_step(of if keyed else plain, fds.sgd(0.01)))
        torch.manual_seed(0)
        params = {"words": torch.randn(WORDS, WIDTH), "qkv": torch.randn(WIDTH, 3 * WIDTH)}
        step(step.init(params), {"input_ids": TOKENS, "labels": TOKENS})

    with pytest.raises(ValueError, match="the loss is not a sum over tokens"):
        comm.simulate(program, world_size=2)


def _staged(first: Layer, second: Layer, *, mean: bool = False) -> float:
    """The loss of the first of two steps of a pipeline of two stages."""

    def embed(params: Any, tokens: Tensor, batch: dict[str, Tensor]) -> Tensor:
        words, qkv, places = params
        return first({"qkv": qkv, "at": places}, words[tokens], batch["position_ids"])

    def head(params: Any, x: Tensor, batch: dict[str, Tensor]) -> fds.Weighted:
        words, kernel = params
        logits, labels = second({"kernel": kernel}, x, batch["position_ids"]) @ words.T, batch["shift_labels"]
        if mean:
            return fds.Weighted(logits.mean(1).square().sum(), torch.tensor(float(len(logits))))
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return fds.Weighted(each, (labels != -100).sum())

    torch.manual_seed(0)
    params = {"words": torch.randn(WORDS, WIDTH), "at": torch.randn(16, WIDTH), "qkv": torch.randn(WIDTH, 3 * WIDTH)}
    params["kernel"] = torch.randn(WIDTH, WIDTH, 2) / 9
    pieces = [pp.Piece(embed, uses=("words", "qkv", "at")), pp.Piece(head, uses=("words", "kernel"))]
    model = pp.stages(pieces, params, inputs=lambda batch: batch["input_ids"])

    def program() -> float:
        mesh = comm.mesh(pp=2, sp=2)
        strategy = [T.zero(0, mesh["sp"]), T.pipeline(pp.one_f_one_b(2, 2), model, mesh["pp"]), T.sequence(mesh["sp"])]
        step = fds.compose(*strategy)(fds.train_step(model, fds.sgd(0.01)))
        state, batch = step.init(params), {"input_ids": TOKENS, "labels": TOKENS}
        state, metrics = step(state, batch)
        step(state, batch)
        return metrics["loss"].item()

    return comm.simulate(program, world_size=4)[0]


def _same(params: dict[str, Tensor], x: Tensor, at: Tensor) -> Tensor:
    return x


def _shifted(params: dict[str, Tensor], x: Tensor, at: Tensor) -> Tensor:
    return x + F.pad(x[:, :-1], (0, 0, 1, 0))


STAGES = {
    "positions in the first stage": (_table(_here), _same, "where tokens change their places"),
    "a shift in the last stage": (_attention(), _shifted, "where tokens change their places"),
    "a mean over positions": (_attention(), _same, "the loss is not a sum over tokens"),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_are_checked(name: str) -> None:
    first, second, words = STAGES[name]
    with pytest.raises(ValueError, match=words):
        _staged(first, second, mean="mean" in name)


def with_sums(params: dict[str, Tensor], x: Tensor, at: Tensor) -> Tensor:
    """Sums over earlier positions, as an attention of its own."""
    return x + seq.ulysses(lambda q, k, v: v.cumsum(2))(*[x[:, None]] * 3)[:, 0]


@pytest.mark.parametrize("second", [_same, with_sums])
def test_right_stages_pass(second: Layer) -> None:
    """Also where one of them has an attention of its own, of which the other knows nothing."""
    _staged(_table(lambda at: at), second)


GROUPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a ring of all ranks inside of Ulysses": (lambda mesh: seq.ulysses(seq.ring(), mesh["heads"]), lambda mesh: None),
    "all gathered inside of Ulysses": (lambda mesh: seq.ulysses(seq.gathered(), mesh["heads"]), lambda mesh: None),
    "the ring alone": (lambda mesh: seq.ring(mesh["ring"]), lambda mesh: None),
    "Ulysses alone": (lambda mesh: seq.ulysses(None, mesh["heads"]), lambda mesh: None),
    "leaves that stay whole": (lambda mesh: seq.gathered(), lambda mesh: {"extra": 1}),
}


@pytest.mark.parametrize("name", GROUPS)
def test_attention_to_another_sequence_than_the_steps_is_refused(name: str) -> None:
    """With a key, so with a loss that may be any function; it attends to a part of the sequence, or to more than all of it."""
    make, dims = GROUPS[name]

    def program() -> None:
        mesh = comm.mesh(ring=2, heads=2)
        layer = _attention(None, make(mesh))

        def loss(params: dict[str, Tensor], batch: dict[str, Tensor], key: Any) -> fds.Weighted:
            x = key.dropout(layer(params, params["words"][batch["input_ids"]], batch["extra"]), 0.1, "x")
            return fds.Weighted(x.square().sum(), torch.tensor(float(x.shape[1])))

        layout = seq.SequenceLayout("contiguous", inner=2)
        cut = T.sequence(mesh["ring", "heads"], layout=layout, dims=dims(mesh) or 1)
        step = fds.compose(T.zero(0), cut)(fds.train_step(loss, fds.sgd(0.1)))
        torch.manual_seed(0)
        params = {"words": torch.randn(WORDS, WIDTH), "qkv": torch.randn(WIDTH, 3 * WIDTH)}
        step(step.init(params), {"input_ids": TOKENS, "extra": TOKENS})

    with pytest.raises(ValueError, match=r"have \d+ positions together, and the sequence of the step's T.sequence 16 on 4"):
        comm.simulate(program, world_size=4)


def test_torch_draws_are_refused() -> None:
    with pytest.raises(RuntimeError, match="drew from torch's random generator"):
        _run(lambda params, x, at: F.dropout(_attention()(params, x, at), 0.5))
