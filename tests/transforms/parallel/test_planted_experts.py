"""Bugs of expert parallelism and of balance, as large training systems had them, each planted alone: a law must break."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.planting import Bug, planted
from tests.transforms.parallel import test_balance, test_experts_beside
from tests.transforms.parallel.mixture import PATTERN, loss, params
from tests.transforms.parallel.test_experts import assert_same, exchanged, local, on_ranks, trained

pytestmark = pytest.mark.timeout(60)


@cache
def alone() -> Any:
    return trained([T.clip(0.5)], 8)


def experts_are_one_device(stage: int, edp: int, ep: int) -> None:
    """Losses, norms and params of some clipped steps."""
    program = on_ranks([], lambda dp, mesh: T.zero(stage, dp), [T.clip(0.5)], edp, ep, rows=8)
    for found in comm.simulate(program, world_size=edp * ep):
        assert_same(found, alone())


def an_overflow_is_everybodys(stage: int) -> None:
    """An expert's gradient that is not finite on one rank skips the step on all."""

    def program() -> float:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        here = comm.world().rank

        def bad(p: Any, x: Tensor) -> Tensor:
            return local(p, x) + (exchanged(p["0.up"].sum()) * torch.inf if here == 1 else 0.0)

        chain = [T.mixed_precision("fp16", 2.0), T.zero(stage, mesh["edp", "ep"]), T.experts(PATTERN, mesh["ep"])]
        step = fds.compose(*chain)(fds.train_step(bad, fds.adamw(0.1)))
        _, metrics = step(step.init(params()), torch.ones(2))
        return metrics["skipped"].item()

    assert comm.simulate(program, world_size=2) == [1.0, 1.0]


def each_expert_has_a_state_of_its_own() -> None:
    """Of a rule for matrices, by the number over all ranks."""

    def program() -> Any:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)

        def rule(grad: Tensor, state: Tensor, step: int) -> tuple[Tensor, Tensor]:
            return grad, state

        made = fds.per_matrix(torch.zeros_like, rule, lr=0.1, others=fds.adamw(0.1), matrices="embed", stacks="up")
        chain = T.zero(1, mesh["edp", "ep"]), T.experts(PATTERN, mesh["ep"])
        return list(fds.compose(*chain)(fds.train_step(loss, made)).init(params()).optimizer.states[0].whole)

    names = sorted(name for rank in comm.simulate(program, world_size=2) for name in rank if name.startswith("0"))
    assert names == [f"0.up[{i}]" for i in range(4)]


@cache
def counted_by_hand() -> Any:
    return test_balance.by_hand(16)


def to_the_end(inner: Any, step: fds.Step, state: fds.State, function: Any, given: Any) -> Any:
    """Recomputes everything, also what nobody needs again."""
    with set_checkpoint_early_stop(False):
        return inner(step, state, lambda b: checkpoint(function, b, use_reentrant=False), given)


def biases_are_one_devices(n: int, k: int, recompute: bool) -> None:
    def program() -> Any:
        here = comm.world()
        around = [fds.wrap("again", forward=to_the_end)] if recompute else []
        chain = [T.zero(0), *around, T.balance(test_balance.RATE, test_balance.ROUTERS), T.accumulate(k)]
        return test_balance.trained(chain, 16, (here.rank, here.size))

    for slot, _ in comm.simulate(program, world_size=n):
        assert all(torch.equal(slot.bias[name], bias) for name, bias in counted_by_hand()[0].items())


BUGS: dict[tuple[Any, ...], list[Bug]] = {
    (experts_are_one_device, 0, 2, 2): [
        Bug(
            "gradients of experts are summed over all data-parallel ranks",
            "transforms.zero.collectives:Collectives.reduce",
            "self.groups.among(segments[0].sharers)",
            "self.groups",
        ),
        Bug(
            "gradients of experts are not summed over the ranks that share them",
            "transforms.zero.collectives:Collectives.reduce",
            "self._reduce_whole(flats, groups)",
            "comm.Pending.of(flats) if segments[0].sharers else self._reduce_whole(flats, groups)",
        ),
        Bug(
            "the norm counts what is whole on every rank",
            "transforms.zero.zero:Zero.parts",
            "rank not in segment.holders(0)",
            "False",
        ),
        Bug(
            "the norm counts the first experts alone",
            "transforms.zero.zero:Zero.parts",
            "rank not in segment.holders(0)",
            "rank != 0",
        ),
        Bug(
            "every rank has the first experts",
            "transforms.parallel.experts:Experts._cut",
            "self.ep.rank",
            "0",
        ),
        Bug(
            "all ranks take rank 0's experts",
            "transforms.zero.initial_shards:InitialShards.read",
            "self.groups.among(segment.sharers)",
            "self.groups",
        ),
        Bug(
            "the whole tree has one rank's experts several times",
            "transforms.parallel.experts:Experts.params.whole",
            "comm.all_gather(leaf.detach(), self.ep)",
            "leaf.detach().repeat(self.ep.size, *[1] * (leaf.dim() - 1))",
        ),
    ],
    (experts_are_one_device, 2, 1, 2): [
        Bug(
            "gradients of experts are ep times too large",
            "transforms.zero.reduce:Reducer._start",
            "summed([*map(collectives.to_comm_dtype, flats)])",
            "summed([flat * collectives.groups.n for flat in flats])",
        ),
    ],
    (experts_are_one_device, 3, 2, 2): [
        Bug(
            "gradients of experts are divided by the weight of the ranks that share them",
            "transforms.zero.collectives:Collectives.reduce",
            "self._scatter(flats, first)",
            "self._scatter([f * (self.groups.n / groups.n) for f in flats], first)",
        ),
        Bug(
            "all ranks have the first shard of their experts",
            "sharding.segment:Segment.place",
            "next((block.index(rank) for block in self.sharers if rank in block))",
            "0",
        ),
    ],
    (an_overflow_is_everybodys, 0): [
        Bug(
            "each rank looks at its own experts",
            "transforms.zero.zero:Zero.parts",
            "not layout.has_sharers",
            "True",
        ),
    ],
    (test_experts_beside.test_stochastic_rounding_draws_for_the_whole_leaf, 2): [
        Bug(
            "experts of all ranks draw alike",
            "transforms.precision.stochastic_rounding:Draws.for_param",
            "leaf.region.ranges",
            "False",
        ),
    ],
    (each_expert_has_a_state_of_its_own,): [
        Bug(
            "experts are numbered on each rank",
            "sharding.stacks:unstacked",
            "which * count + place",
            "place",
        ),
    ],
    (biases_are_one_devices, 2, 2, True): [
        Bug(
            "a recomputation counts again",
            "transforms.parallel.load_balance:_Balance.forward.counted",
            "counting is not None and backward_pass() < 0",
            "counting is not None",
        ),
        Bug(
            "the last micro-batch counts alone",
            "transforms.parallel.load_balance:_Balance.gradients",
            "Demands(dict(slot.demand))",
            "Demands()",
        ),
        Bug(
            "each rank counts for itself",
            "transforms.parallel.load_balance:_Balance.update",
            "step.sum_over_ranks(state, slot.demand)",
            "slot.demand",
        ),
        Bug(
            "a bias follows the load",
            "transforms.parallel.load_balance:_Balance._moved",
            "demand.sum() - len(demand) * demand",
            "len(demand) * demand - demand.sum()",
        ),
    ],
    (test_balance.test_a_skipped_update_moves_no_bias, "after"): [
        Bug(
            "a skipped update moves biases",
            "transforms.parallel.load_balance:_Balance.update",
            "state.skip",
            "None",
        ),
    ],
}


@cache
def holds(law: Callable[..., None], *case: Any) -> bool:
    law(*case)
    return True


@pytest.mark.sample(6)
@pytest.mark.parametrize(("case", "bug"), [pytest.param(c, b, id=b.name) for c, bugs in BUGS.items() for b in bugs])
def test_a_bug_breaks_its_law(case: tuple[Any, ...], bug: Bug) -> None:
    law, *rest = case
    assert holds(*case)
    with planted(bug), pytest.raises(bug.shows):
        law(*rest)
