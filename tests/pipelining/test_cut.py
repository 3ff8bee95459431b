"""Stages from modules: together they are the module, bit for bit."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import pipelining as pp
from functional_ds.testing import assert_same

from .modules import CASES, Case, mse, rows

Params = dict[str, Tensor]


def _leaves(params: Params) -> Params:
    return {path: leaf.detach().clone().requires_grad_() for path, leaf in params.items()}


def _of(function: Any, params: Params) -> tuple[Tensor, Params]:
    """A loss and its gradients, from a fixed state of torch's random numbers."""
    leaves = _leaves(params)
    torch.manual_seed(11)
    loss = function(leaves)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    return loss.detach(), {path: torch.zeros_like(leaf) if grad is None else grad for (path, leaf), grad in pairs}


def _apart(stages: pp.Stages, params: Params, batch: Any) -> tuple[Tensor, Params]:
    """The same stage by stage, as on ranks of their own: nothing but x goes forward, nothing but its gradient back."""
    torch.manual_seed(11)
    x: Any = None
    ran = []
    for index, stage in enumerate(stages):
        own = _leaves({path: params[path] for path in stage.paths})
        x = fds.tree.map(lambda t: t.detach().requires_grad_(t.is_floating_point()), x)
        y = stages.run(index, own, x, batch, None)
        ran.append((own, x, y))
        x = y
    totals = {path: torch.zeros_like(leaf) for path, leaf in params.items()}
    seeds: list[Any] = [torch.ones(())]
    for own, x, y in reversed(ran):
        pairs = [(t, g) for t, g in zip(fds.tree.leaves(y), seeds, strict=True) if g is not None and t.requires_grad]
        ends = [t for t in fds.tree.leaves(x) if t.requires_grad]
        outputs, given_ = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, [*ends, *own.values()], given_, allow_unused=True)
        arrived = dict(zip(map(id, ends), found, strict=False))
        seeds = [arrived.get(id(t)) for t in fds.tree.leaves(x)]
        for path, grad in zip(own, found[len(ends) :], strict=True):
            totals[path] += 0 if grad is None else grad
    return ran[-1][2].detach(), totals


def _whole(case: Case, params: Params, batch: Any) -> tuple[Tensor, Params]:
    apply, _ = fds.functional(case.built())
    return _of(lambda leaves: case.loss(apply(leaves, batch[0]), batch), params)


@pytest.mark.law(36)
@given(name=st.sampled_from(sorted(CASES)), data=st.data())
def test_stages_together_are_the_module(name: str, data: st.DataObject) -> None:
    """stages(params, batch) = loss(module(batch)), value and gradients, bitwise, for any cuts and batch sizes."""
    case = CASES[name]
    at = [path for path in case.at if data.draw(st.booleans(), label=path)]
    stages, params = pp.cut(case.built(), at, loss=case.loss, example=case.batch(2))
    assert len(stages) == len(at) + 1
    for size in (2, 3):
        batch = case.batch(size)
        assert_same(_of(lambda leaves: stages(leaves, batch), params), _whole(case, params, batch))  # noqa: B023


@pytest.mark.parametrize("name", CASES)
@pytest.mark.law(36)
def test_stages_apart_are_the_module(name: str) -> None:
    """Stages that share nothing but x have the module's loss; a leaf's gradients on all of its stages sum up to its own."""
    case = CASES[name]
    stages, params = pp.cut(case.built(), case.at, loss=case.loss, example=case.batch(2))
    batch = case.batch(3)
    loss, grads = _apart(stages, params, batch)
    expected, whole = _whole(case, params, batch)
    assert_same(loss, expected)
    torch.testing.assert_close(grads, whole)
