"""Terms of a loss that read experts beside the exchange: refused, or summed over the ranks of ep and the single-device step."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.step.axes import axis
from tests.transforms.parallel.mixture import PATTERN, batch, loss, params

ROWS = 8
RATE = 0.3


def penalised(p: Any, given: Any, *, summed: bool) -> fds.Weighted:
    """The mixture's loss and the squares of all params; those of experts may be summed over ep."""
    found = axis("ep")
    ep = None if found is None or found.group.size == 1 else found.group
    whole = loss(p, given, ep)
    experts = torch.stack([leaf.square().sum() for path, leaf in p.items() if re.search(PATTERN, path)]).sum()
    dense = torch.stack([leaf.square().sum() for path, leaf in p.items() if not re.search(PATTERN, path)]).sum()
    if ep is not None and summed:
        experts = comm.all_reduce(experts, ep)
    return fds.Weighted(whole.sum + RATE * (dense + experts) * whole.weight, whole.weight)


def steps(
    transforms: list[fds.Transform], part: tuple[int, int], *, summed: bool = True
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and params of two steps on a part of the batch."""
    step = fds.compose(*transforms)(fds.train_step(lambda p, b: penalised(p, b, summed=summed), fds.adamw(1e-2, eps=1e-4)))
    state, losses = step.init(params()), []
    for _ in range(2):
        state, metrics = step(state, tuple(x.tensor_split(part[1])[part[0]] for x in batch(ROWS)))
        losses.append(metrics["loss"].item())
    return losses, step.params(state)


def on_ranks(edp: int, ep: int, stage: int, remat: bool, *, summed: bool) -> Any:
    def program() -> Any:
        mesh = comm.mesh(dp=edp * ep).split("dp", edp=edp, ep=ep)
        dp = mesh["edp", "ep"]
        inside = [T.remat("")] if remat else []
        return steps(
            [T.zero(stage, dp), T.experts(PATTERN, mesh["ep"], edp=mesh["edp"]), *inside], (dp.rank, dp.size), summed=summed
        )

    return program


@pytest.mark.law
@given(st.sampled_from([(1, 2), (2, 2), (1, 4)]), st.sampled_from([0, 1, 2, 3]), st.booleans())
@settings(max_examples=4)
def test_a_penalty_summed_over_the_ranks_is_the_single_device(sizes: tuple[int, int], stage: int, remat: bool) -> None:
    losses, end = steps([], (0, 1))
    for found, leaves in comm.simulate(on_ranks(*sizes, stage, remat, summed=True), world_size=sizes[0] * sizes[1]):
        assert found == pytest.approx(losses, rel=2e-5)
        for path, leaf in end.items():
            torch.testing.assert_close(leaves[path], leaf, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("stage", "remat"), [(0, False), (2, True), (3, False)])
def test_a_penalty_on_a_ranks_own_experts_is_refused(stage: int, remat: bool) -> None:
    with pytest.raises(ValueError, match=r"reads the leaf '\d\.(up|down|bias)' in addition to .* 2 times too little"):
        comm.simulate(on_ranks(2, 2, stage, remat, summed=False), world_size=4)
