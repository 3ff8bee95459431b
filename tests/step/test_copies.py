"""Copies of steps and states go on as what they are copies of."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import transforms as T

STRATEGIES: dict[str, tuple[fds.Transform, ...]] = {
    "none": (),
    "zero": (T.zero(3), T.clip(1.0)),
    "remat": (T.remat(),),
    "named remat": (T.remat("", policy="recompute,inputs=offload,matmuls=save"),),
    "offload": (T.offload("cpu"),),
    "precision": (T.ema(0.9), T.mixed_precision("fp16"), T.zero(2)),
}
COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda held: pickle.loads(pickle.dumps(held))}


def square(apply: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda params, x: apply(params, x).square().mean()


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("how", COPIES)
def test_a_copied_state_goes_on(name: str, how: str) -> None:
    """step(copy(state)) = step(state), bit for bit; steps themselves are copied, too."""
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    step = fds.compose(*STRATEGIES[name])(fds.train_step(square(apply), fds.adamw(1e-2)))
    state, _ = step(step.init(params), torch.ones(2, 4))
    copied, again = COPIES[how](state), copy.deepcopy(step)
    found = []
    for each, begin in ((step, state), (again, copied)):
        middle, _ = each(begin, torch.ones(2, 4))
        end, metrics = each(middle, torch.ones(2, 4))
        found.append((each.params(end), metrics["loss"]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_policies_are_copied() -> None:
    policy = fds.RematPolicy.parse("recompute,attn_out=save")
    assert [each(policy) for each in COPIES.values()] == [policy, policy]
