"""What tensor-parallel ranks must have alike is compared in the first step, and what differs is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def _run(build: Callable[[], nn.Module], plan: Any, stage: int | None, loss: Any) -> None:
    torch.manual_seed(0)
    apply, params = fds.functional(build())

    def program() -> None:
        mesh = comm.mesh(dp=2, tp=2)
        zero = [] if stage is None else [T.zero(stage, mesh["dp"])]
        step = fds.compose(*zero, T.tensor_parallel(plan, mesh["tp"]))(
            fds.train_step(lambda p, x: loss(apply(p, x)), fds.sgd(0.1))
        )
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, X[mesh["dp"].rank :: 2])

    comm.simulate(program, world_size=4)


class _Scaled(nn.Module):
    """Two linears, and a factor by feature between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 4), nn.Linear(4, 8), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x) * self.scale).tanh())  # type: ignore[no-any-return]


def _square(y: Tensor) -> Tensor:
    return y.square().mean()


PLAN = {"up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_whole_leaves_used_on_slices_are_named(stage: int | None) -> None:
    with pytest.raises(ValueError, match=r"gradients of 'scale', which is not split, differ.*replicated_with_grad_allreduce"):
        _run(_Scaled, PLAN, stage, _square)


class _Silent(_Scaled):
    """The last layer begins as zeros, so the first step's gradients of what is before it are zeros."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_leaves_behind_a_layer_of_zeros_are_named_in_the_second_step(stage: int | None) -> None:
    with pytest.raises(ValueError, match=r"gradients of 'scale', which is not split, differ.*replicated_with_grad_allreduce"):
        _run(_Silent, PLAN, stage, lambda y: (y - 1).square().mean())


def overflows(ranks: int) -> list[tuple[float, ...]]:
    """Losses, skips and scales of a step whose first updates overflow."""
    torch.manual_seed(0)
    params = {"up": torch.randn(8, 4), "down": torch.randn(4, 8), "norm": torch.ones(4)}

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (fds.tp.row(fds.tp.column(x, p["up"]).tanh(), p["down"]) * p["norm"]).square().mean()

    def program() -> list[tuple[float, ...]]:
        plan = T.tensor_parallel({"up": "colwise", "down": "rowwise"})
        step = fds.compose(T.mixed_precision("fp16"), plan)(fds.train_step(loss, fds.sgd(0.1)))
        state, found = step.init(params), []
        for _ in range(5):
            state, metrics = step(state, torch.ones(3, 4))
            found.append(tuple(metrics[name].item() for name in ("loss", "skipped", "loss_scale")))
        return found

    return comm.simulate(program, world_size=ranks)[0]


def test_steps_that_a_loss_scale_skips_are_not_compared() -> None:
    """Gradients that overflow differ on ranks; the scale goes down as on one device, and the first finite ones are compared."""
    expected, found = torch.tensor(overflows(1)), torch.tensor(overflows(2))
    assert expected[0, 1] == 1
    assert expected[-1, 1] == 0
    torch.testing.assert_close(found, expected, rtol=3e-3, atol=0)


class _Outside(_Scaled):
    """The factor acts on what is whole."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.down(self.up(x).tanh())  # type: ignore[no-any-return]


SUMMED = PLAN | {"scale": "replicated_with_grad_allreduce"}


def whole_leaves_that_are_summed_are_named(stage: int | None = None) -> None:
    with pytest.raises(ValueError, match=r"for 'scale', and all ranks of 'tp' have the same gradients.*2 times too large"):
        _run(_Outside, SUMMED, stage, _square)


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_whole_leaves_that_are_summed(stage: int | None) -> None:
    whole_leaves_that_are_summed_are_named(stage)


@pytest.mark.parametrize("stage", [None, 3])
def test_leaves_that_are_used_on_slices_are_summed(stage: int | None) -> None:
    _run(_Scaled, SUMMED, stage, _square)


def test_slices_that_begin_alike_say_nothing() -> None:
    class Constant(_Scaled):
        def __init__(self) -> None:
            super().__init__()
            for parameter in self.parameters():
                nn.init.constant_(parameter, 0.1)

    _run(Constant, SUMMED, None, _square)


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_right_plans_pass(stage: int | None) -> None:
    _run(lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8)), {"0": "colwise", "2": "rowwise"}, stage, _square)


def test_a_loss_of_slices_is_named() -> None:
    """A cross entropy of a cut vocabulary."""

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))

    with pytest.raises(ValueError, match=r"all ranks of 'tp' compute one loss.*fds\.tp\.cross_entropy"):
        _run(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6)), {"1": "colwise"}, None, loss)


def test_a_layer_that_ran_without_gradients_first() -> None:
    """Its input is shared with no layer that has gradients."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.up, self.other, self.down = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            with torch.no_grad():
                gate = self.up(x).sigmoid()
            return self.down(self.other(x).tanh() * gate)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Twice()
    apply, params = fds.functional(model)
    _square(model(X)).backward()

    def program() -> Any:
        step = T.tensor_parallel({"up": "colwise", "other": "colwise", "down": "rowwise"})(
            fds.train_step(lambda p, x: _square(apply(p, x)), fds.sgd(1.0))
        )
        state, _ = step(step.init(params), X)
        return step.params(state)

    found = comm.simulate(program, world_size=2)[0]
    torch.testing.assert_close(found["inner.weight"], (model.inner.weight - model.inner.weight.grad).detach())  # type: ignore[operator]


def test_ulysses_over_the_ranks_of_its_own_attention_is_refused() -> None:
    attention = fds.seq.ulysses(fds.seq.ring())

    def loss(params: Any, batch: Any) -> Any:
        q = (batch["tokens"][..., None, None] * params["w"]).transpose(1, 2)
        return fds.Weighted(attention(q, q, q).sum(), batch["tokens"].numel())

    def program() -> None:
        mesh = comm.mesh(sp=2)
        step = fds.compose(T.zero(0, mesh["sp"]), T.sequence(mesh["sp"], dims={"tokens": 1}))(
            fds.train_step(loss, fds.sgd(0.1))
        )
        step(step.init({"w": torch.ones(2, 4)}), {"tokens": torch.ones(1, 8)})

    with pytest.raises(ValueError, match=r"splits this attention's heads over the ranks of the step's T\.sequence already"):
        comm.simulate(program, world_size=2)


def test_a_plan_that_cuts_nothing_under_tp_functions() -> None:
    params = {"up": torch.ones(4, 8), "down": torch.ones(8, 4)}

    def program() -> None:
        step = fds.train_step(lambda p, x: _square(fds.tp.row(fds.tp.column(x, p["up"]), p["down"])), fds.sgd(0.1))
        step = T.tensor_parallel({})(step)
        step(step.init(params), X)

    with pytest.raises(ValueError, match=r"plan=\{\} splits no leaf, and the loss calls functions of fds\.tp.*the 2 ranks of"):
        comm.simulate(program, world_size=2)


class _Reshaped(nn.Module):
    """It counts heads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.num_heads = nn.Linear(8, 8), nn.Linear(8, 8), 4

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(-1, self.num_heads, 2).tanh().flatten(1))  # type: ignore[no-any-return]


def test_shapes_that_do_not_fit_are_named() -> None:
    found = r"'' \(_Reshaped\) fails on slices over the 2 ranks of 'tp': .*up\.weight \[4, 8\] of 8.*such as \['num_heads'\]"
    with pytest.raises(ValueError, match=found) as caught:
        _run(_Reshaped, PLAN, None, _square)
    assert type(caught.value.__cause__) is RuntimeError
    _run(_Reshaped, {**PLAN, "num_heads": "local"}, None, _square)


class _Normed(nn.Module):
    """A norm between two linears."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), norm, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))  # type: ignore[no-any-return]


def test_the_groups_of_a_cut_norm_are_cut() -> None:
    """Else each rank would make all groups of its own features."""

    def losses(plan: Any, ranks: int) -> list[float]:
        torch.manual_seed(0)
        apply, params = fds.functional(_Normed(nn.GroupNorm(4, 8)))

        def program() -> list[float]:
            step = T.tensor_parallel(plan)(fds.train_step(lambda p, x: _square(apply(p, x)), fds.sgd(0.1)))
            state, found = step.init(params), []
            for _ in range(3):
                state, metrics = step(state, X)
                found.append(metrics["loss"].item())
            return found

        return comm.simulate(program, world_size=ranks)[0]

    cut = {**PLAN, r"^norm\.(weight|bias)$": 0}
    found = r"'norm\.(weight|bias)' is split over the 2 ranks of 'world'.*all 4 groups.*add \{'norm\.num_groups': 'local'\}"
    with pytest.raises(ValueError, match=found):
        losses(cut, 2)
    expected = losses({}, 1)
    assert losses(cut, 1) == expected
    assert losses({**cut, "num_groups": "local"}, 2) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("norm", "says"),
    [
        (nn.GroupNorm(4, 8), r"\{'norm\.weight': 0, 'norm\.bias': 0, 'norm\.num_groups': 'local'\}"),
        (nn.LayerNorm(8), "LayerNorm needs all features of its input: use 'colwise_gather_output'"),
        (nn.RMSNorm(8), "RMSNorm needs all features of its input"),
        (nn.BatchNorm1d(8), "running statistics of a BatchNorm1d are buffers, which stay whole: use 'colwise_gather_output'"),
    ],
)
def test_what_to_do_with_a_norm_on_slices(norm: nn.Module, says: str) -> None:
    """The advice is for this norm, and holds."""
    with pytest.raises(ValueError, match=says):
        _run(lambda: _Normed(norm), PLAN, None, _square)
    if not isinstance(norm, nn.GroupNorm):
        _run(lambda: _Normed(norm), {"up": "colwise_gather_output", "down": "rowwise_split_input"}, None, _square)


def test_an_error_outside_of_modules_names_what_is_cut() -> None:
    """A head of the loss's own, on an embedding of which each rank has some words."""
    apply, params = fds.functional(nn.Sequential(nn.Embedding(8, 4)))

    def loss(p: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(apply(p, tokens) @ p["0.weight"].T, tokens)

    def program() -> None:
        step = T.tensor_parallel({"0": "vocab"})(fds.train_step(loss, fds.sgd(0.1)))
        step(step.init(params), torch.arange(8))

    with pytest.raises(IndexError, match="out of bounds") as caught:
        comm.simulate(program, world_size=2)
    assert "slices over the 2 ranks of 'world' of the leaves '0.weight'" in "".join(caught.value.__notes__)


class _Grouped(nn.Module):
    """Queries of four heads, and two heads of keys, in wrappers as LoRA's; a norm of the whole keys."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = 2, 2
        self.q, self.k, self.o = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 4)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (each(x).unflatten(-1, (-1, 2)) for each in (self.q, self.k))
        return self.o((q * k.repeat_interleave(self.num_key_value_groups, 1)).tanh().flatten(1))  # type: ignore[no-any-return]


class _Tied(nn.Module):
    """A head that shares its weight, which the plan cuts, and has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x.abs().argmax(-1)).tanh() + x)  # type: ignore[no-any-return]


class _GatheredGrouped(_Grouped):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 4)  # type: ignore[assignment]


GATHERED = {"q": "colwise_gather_output", "k": "colwise_gather_output", "o": "rowwise_split_input"}


@pytest.mark.law(40)
@pytest.mark.parametrize(
    ("build", "plan"),
    [
        (_Grouped, {"q.0": "colwise", "k.0": "colwise", "o": "rowwise"}),
        (_GatheredGrouped, GATHERED),
        (_Tied, {"words": "vocab"}),
    ],
    ids=["shared heads in wrappers", "shared heads that are gathered", "a whole bias of a tied head"],
)
def test_whole_and_shared_parts(build: Callable[[], nn.Module], plan: dict[str, str]) -> None:
    torch.manual_seed(0)
    apply, params = fds.functional(build())

    def program() -> Any:
        step = T.tensor_parallel(plan)(fds.train_step(lambda p, x: _square(apply(p, x)), fds.sgd(1.0)))
        state, metrics = step(step.init(params), X)
        return metrics["loss"], step.params(state)

    expected, *_ = comm.simulate(program, world_size=1)
    for found in comm.simulate(program, world_size=4):
        torch.testing.assert_close(found, expected)
