"""Params that are not trained, in transforms whose update is a function of all params: they stay what they are."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.testing import assert_same
from tests.planting import Bug, planted


def halved(step: fds.Step, state: fds.State) -> fds.State:
    """All params alike, as a clamp or a mean with older ones would do."""
    return fds.tree.replace(state, params=fds.tree.map(lambda leaf: leaf // 2, state.params))


def start() -> dict[str, Tensor]:
    whole = torch.tensor([4, 8])
    return {"a": torch.arange(16.0, 31.0).view(5, 3), "fixed": fds.freeze(torch.arange(64.0, 71.0)), "places": whole}


def loss(params: Any, x: Tensor) -> Tensor:
    return (x @ params["a"] + params["fixed"].sum() + params["places"].sum()).sum(1).mean()


def batches(n: int) -> list[Tensor]:
    return [torch.ones(12 // n, 5)] * 3


def trained(stages: Sequence[int] = (), *, outside: bool = False, gather: Any = comm.all_gather) -> dict[str, Tensor]:
    options = {"all_gather": gather} if gather is not comm.all_gather else {}
    strategy = [T.every(1, halved), *(T.zero(stage, **options) for stage in stages)]
    step = fds.compose(*(reversed(strategy) if outside else strategy))(fds.train_step(loss, fds.sgd(1.0, momentum=0.5)))
    state = step.init(start())
    for x in batches(comm.world().size):
        state, _ = step(state, x)
    return step.params(state)  # type: ignore[no-any-return]


def plain() -> dict[str, Tensor]:
    params = {path: leaf.detach().clone() for path, leaf in start().items()}
    weight = torch.nn.Parameter(params["a"])
    rule = torch.optim.SGD([weight], 1.0, momentum=0.5)
    for x in batches(1):
        rule.zero_grad()
        loss({**params, "a": weight}, x).backward()
        rule.step()
        with torch.no_grad():
            params = {path: leaf // 2 for path, leaf in (params | {"a": weight}).items()}
            weight.copy_(params["a"])
    return params


@pytest.mark.law(19)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_function_of_all_params_trains_none_that_is_frozen(stage: int | None, outside: bool) -> None:
    """Every stage gives the bits of plain PyTorch, new values of frozen params among them."""
    stages = () if stage is None else (stage,)
    for found in comm.simulate(partial(trained, stages, outside=outside), world_size=1 if stage is None else 3):
        assert isinstance(found["fixed"], torch.nn.Parameter)
        assert not found["fixed"].requires_grad
        for path, leaf in plain().items():
            assert torch.equal(found[path], leaf), path


def written_in_place(stage: int) -> list[float]:
    """A frozen leaf after two updates within zero, each of which adds one to what the rank has of all leaves."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        for leaf in fds.tree.leaves(state.params):
            leaf.detach().add_(1.0)
        return state, metrics

    params = {"a": torch.ones(8), "fixed": torch.nn.Parameter(torch.arange(8.0), requires_grad=False)}
    plain = fds.train_step(lambda params, x: (params["a"] * params["fixed"] * x).sum(), fds.sgd(0.1))
    step = T.zero(stage)(fds.wrap("writes", update=update)(plain))
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, torch.ones(8))
    return step.params(state)["fixed"].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", range(4))
def test_a_frozen_leaf_that_is_written_in_place_is_written_on_all_ranks(stage: int) -> None:
    assert comm.simulate(written_in_place, stage, world_size=2) == [[2.0 + i for i in range(8)]] * 2


def on_processes() -> list[tuple[dict[str, Tensor], list[float]]]:
    return [(trained((stage,)), written_in_place(stage)) for stage in (1, 3)]


def test_on_processes() -> None:
    """On two processes frozen params are what they are on simulated ranks."""
    for rank in comm.spawn(on_processes, world_size=2):
        for found, written in rank:
            assert not found["fixed"].requires_grad
            assert_same(found, plain())
            assert written == [2.0 + i for i in range(8)]


def test_new_values_of_frozen_params_pass_the_codec() -> None:
    """Stages 1 to 3 gather alike what a transform has made of them."""
    narrow = comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8))
    first, *others = (comm.simulate(partial(trained, (stage,), gather=narrow), world_size=2)[1] for stage in (1, 2, 3))
    for found in others:
        torch.testing.assert_close(found, first, rtol=0, atol=0)


def test_whole_numbers_stay_whole() -> None:
    def divided(step: fds.Step, state: fds.State) -> fds.State:
        return fds.tree.replace(state, params=fds.tree.map(lambda leaf: leaf / 2, state.params))

    step = T.every(1, divided)(fds.train_step(loss, fds.sgd(1.0)))
    with pytest.raises(ValueError, match=r"makes torch\.float32 of shape \[2\] of state\.params 'places', .* cast"):
        step(step.init(start()), batches(1)[0])


BUGS = [
    Bug("frozen leaves lose their mark", "step.state.skipped:marking", "like_marked(leaves[i], still[i])", "leaves[i]"),
    Bug("values of whole frozen segments are dropped", "transforms.zero.zero:Zero._published", "shards[i] is shard", "True"),
]
WRITTEN = Bug("writes in place are not seen", "transforms.zero.zero:Zero._published", "version_of(shard) == version", "True")


def test_a_write_that_is_not_seen_is_found() -> None:
    with planted(WRITTEN), pytest.raises(AssertionError):
        test_a_frozen_leaf_that_is_written_in_place_is_written_on_all_ranks(1)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises((AssertionError, ValueError)):
        test_a_function_of_all_params_trains_none_that_is_frozen(1, False)
