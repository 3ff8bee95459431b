"""Gradients in another dtype than their parameters are copied a few at a time, and nothing else changes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import transforms as T
from functional_ds.base.weighted import Weighted
from functional_ds.dry_run.events import recorded
from functional_ds.optim import kernels

RULES = [fds.adamw(0.1), fds.sgd(0.1, momentum=0.9), fds.adagrad(0.1), fds.adam(0.1, bias_correction=False)]
SHAPES = [(40,), (3, 5), (), (64,), (8, 8)]


def _trained(rule: Any, copied: int, patch: pytest.MonkeyPatch) -> list[Tensor]:
    patch.setattr(kernels, "_COPIED", copied)
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=draw) for shape in SHAPES]
    step = T.mixed_precision("bf16", loss_scale=1.0)(
        fds.train_step(lambda params, x: sum((p * x).square().sum() for p in params), rule)
    )
    state = step.init(params)
    for scale in (1.0, float("inf"), 0.5):  # the second is skipped
        state, _ = step(state, torch.tensor(scale))
    return fds.tree.leaves((step.params(state), state.optimizer))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("copied", [1, 64])
def test_chunks_give_equal_bits(rule: Any, copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _trained(rule, 2**30, monkeypatch)
    assert all(map(torch.equal, _trained(rule, copied, monkeypatch), expected))


def test_copies_are_there_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, params = fds.adamw(0.1), [torch.zeros(1000) for _ in range(8)]
    grads, state = Weighted([torch.ones(1000, dtype=torch.bfloat16) for _ in params], torch.tensor(1.0)), rule.init(params)
    peaks = []
    for copied in (2**30, 2000):
        monkeypatch.setattr(kernels, "_COPIED", copied)
        with recorded() as run:
            rule.update(params, grads, state, 1.0)
        peaks.append(run.events.peak())
    assert peaks[0] >= 8 * 4000
    assert peaks[1] <= 4 * 4000  # the next chunk is copied before the last goes
