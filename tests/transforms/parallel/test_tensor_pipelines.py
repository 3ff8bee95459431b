"""Pipelines whose stages are tensor-parallel modules are one device's step."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from tests.transforms.parallel.test_tensor_parallel import Layer

TOLERANCE = 1e-5
PLAN = {"up": fds.tp.Packed([8, 4]), "down": "rowwise"}


@cache
def layers() -> tuple[Layer, ...]:
    """Four layers, the same on every rank."""
    torch.manual_seed(0)
    return tuple(Layer() for _ in range(4))


@cache
def functions() -> list[tuple[fds.Apply, dict[str, Tensor]]]:
    """The layers as functions, and their params."""
    return [fds.functional(layer) for layer in layers()]


def loss(y: Tensor, batch: Any) -> Tensor:
    return (y - batch[1]).square().mean()


def model_of(kind: str, stages: int) -> Any:
    """Stages of functions, or of a module that is cut, and the params."""
    if kind == "functions":
        applies = [apply for apply, _ in functions()[:stages]]
        made = [lambda p, x, apply=apply: apply(p, x) for apply in applies]
        return pp.stages(made, [params for _, params in functions()[:stages]], loss=loss), [p for _, p in functions()[:stages]]
    module = nn.Sequential(*layers()[:stages])
    return pp.cut(module, [str(i) for i in range(1, stages)], example=torch.zeros(2, 4, 6), loss=loss)


def train(kind: str, stages: int, *strategy: fds.Transform, part: tuple[int, int] = (0, 1)) -> Any:
    model, params = model_of(kind, stages)
    strategy = tuple(each(model) if getattr(each, "__name__", "") == "piped" else each for each in strategy)
    step = fds.compose(*strategy, T.clip(0.1))(fds.train_step(model, fds.adamw(1e-2, eps=1e-4)))
    state = step.init(params)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 4, 6, generator=generator), torch.randn(8, 4, 6, generator=generator)
    found = []
    for _ in range(2):
        state, metrics = step(state, (x.chunk(part[1])[part[0]], y.chunk(part[1])[part[0]]))
        found += [metrics["loss"].item(), metrics["grad_norm"].item()]
    return found, step.params(state)


SCHEDULES = (pp.one_f_one_b(2, 2), pp.zbv(2, 4), pp.interleaved_one_f_one_b(2, 2))


@pytest.mark.law(54)
@settings(max_examples=max(4, settings.default.max_examples // 3))
@given(
    kind=st.sampled_from(("functions", "cut")),
    schedule=st.sampled_from(SCHEDULES),
    zero=st.sampled_from((None, 1, 3)),
    tp=st.sampled_from((1, 2)),
)
def test_stages_on_slices_are_whole_stages(kind: str, schedule: pp.Schedule, zero: int | None, tp: int) -> None:
    """Losses, norms and params, with backward passes split or not, over pp × tp and dp × pp × tp."""
    dp = 1 if zero is None else 2

    def program() -> Any:
        mesh = comm.mesh(dp=dp, pp=schedule.ranks, tp=tp)

        def piped(model: Any) -> fds.Transform:
            return T.pipeline(schedule, model, mesh["pp"])

        strategy = [*([] if zero is None else [T.zero(zero, mesh["dp"])]), piped, T.tensor_parallel(PLAN, mesh["tp"])]
        return train(kind, schedule.stages, *strategy, part=(mesh["dp"].rank, dp))

    expected = train(kind, schedule.stages)
    for found, params in comm.simulate(program, world_size=dp * schedule.ranks * tp):
        assert found == pytest.approx(expected[0], rel=TOLERANCE)
        for ours, theirs in zip(fds.tree.leaves(params), fds.tree.leaves(expected[1]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
