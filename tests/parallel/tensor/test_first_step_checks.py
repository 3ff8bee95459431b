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
    with pytest.raises(ValueError, match=r"gradients of 'scale', which is not cut, differ.*replicated_with_grad_allreduce"):
        _run(_Scaled, PLAN, stage, _square)


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

    with pytest.raises(ValueError, match=r"cuts this attention's heads over the ranks of the step's T\.sequence already"):
        comm.simulate(program, world_size=2)
