"""Keys of plans: of several that mean a layer the most exact one counts, also where it says that nothing is cut."""

import itertools
import re
from collections import OrderedDict
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.parallel.tensor.words import fits

CUT, WHOLE = "colwise_gather_output", "replicated"  # of each layer the input and the output are whole, so all mixes are right
BLOCKS, LAYERS = ("a", "experts"), ("up", "down")
PATHS = [f"{list_}.{block}.{layer}" for list_ in ("0", "1") for block in BLOCKS for layer in LAYERS]
KEYS = [
    *LAYERS,
    "*",
    *(".".join(each) for each in itertools.product((*BLOCKS, "*", "exp*"), (*LAYERS, "*"))),
    *(".".join(each) for each in itertools.product(("0", "*", "[01]"), (*BLOCKS, "*"), (*LAYERS, "*"))),
]


class Net(nn.Module):
    """Two lists of two blocks of two linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = lambda: nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})  # noqa: E731
        for name in ("0", "1"):
            self.add_module(name, nn.ModuleDict({each: block() for each in BLOCKS}))

    def forward(self, x: Tensor) -> Tensor:
        for path in PATHS:
            x = self.get_submodule(path)(x).tanh()
        return x


def trained(plan: dict[str, Any], build: Any = Net) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """The weights after two steps, and which of them are cut."""
    apply, params = fds.functional(build())
    step = T.tensor_parallel(plan)(fds.train_step(lambda p, x: apply(p, x).square().sum(), fds.sgd(0.1)))
    state = step.init(params)
    for index in range(2):
        state, _ = step(state, torch.randn(3, 4, generator=torch.Generator().manual_seed(index)))
    return step.params(state), {path: leaf.shape != params[path].shape for path, leaf in state.params.items()}


@cache
def alone(build: Any = Net) -> dict[str, Tensor]:
    """What one device makes of it."""
    return comm.simulate(trained, {}, build, world_size=1)[0][0]  # type: ignore[no-any-return]


def meant(plan: dict[str, str], path: str) -> set[str]:
    """What the keys say that mean the fewest of all paths, with this one among them."""
    universe = [".".join(each) for each in itertools.product(("0", "1", "2"), (*BLOCKS, "b", "expert"), (*LAYERS, "gate"))]
    universe += [f"{top}.{each}" for top in "xy" for each in universe] + [each.partition(".")[2] for each in universe]
    universe += [*LAYERS, "gate"]
    means = {key: frozenset(each for each in universe if fits(key, each)) for key in plan if fits(key, path)}
    return {plan[key] for key in means if not any(means[other] < means[key] for other in means)}


@st.composite
def plans(draw: st.DrawFn) -> dict[str, str]:
    """A key and a longer one, in any order, which contradict each other, among others."""
    names, size = draw(st.sampled_from(PATHS)).split("."), draw(st.integers(1, 2))
    shorter, longer = names[-size:], names[-draw(st.integers(size + 1, 3)) :]
    shorter[0] = draw(st.sampled_from([shorter[0], "*"]))
    words = draw(st.permutations([CUT, WHOLE]))
    pair = draw(st.permutations([(".".join(shorter), words[0]), (".".join(longer), words[1])]))
    others = draw(st.dictionaries(st.sampled_from(KEYS), st.sampled_from([CUT, WHOLE]), max_size=2))
    return {**dict(pair), **{key: word for key, word in others.items() if key not in dict(pair)}}


@given(plans())
def test_the_most_exact_key_counts(plan: dict[str, str]) -> None:
    """Law: a plan is the single-device step, and cuts what its most exact keys say; or two that contradict are refused."""
    check_keys(plan)


def check_keys(plan: dict[str, str]) -> None:
    """The law for a plan."""
    says = {path: meant(plan, path) for path in PATHS}
    twice = any(sum(fits(key, path) and plan[key] == CUT for key in plan) > 1 for path in PATHS)
    try:
        params, cut = comm.simulate(trained, plan, world_size=2)[0]
    except ValueError as error:
        refusal = str(error)
        assert "neither key is more specific" in refusal or "two expressions split" in refusal, refusal
        assert twice or any(len(each) > 1 for each in says.values()), refusal
        return
    torch.testing.assert_close(params, alone())
    for path in PATHS:
        assert cut[f"{path}.weight"] == cut[f"{path}.bias"] == (CUT in says[path]), path


EXAMPLE = {"up": "colwise", "down": "rowwise", "experts.up": "replicated", "experts.down": "replicated"}


class Pair(nn.Sequential):
    """Two blocks of two linears each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        block = lambda: nn.Sequential(OrderedDict(up=nn.Linear(4, 8), act=nn.Tanh(), down=nn.Linear(8, 4)))  # noqa: E731
        super().__init__(OrderedDict(a=block(), experts=block()))


def test_a_longer_key_keeps_a_leaf_whole() -> None:
    """The example: experts stay whole on every rank; keys may stand in any order."""
    for plan in (EXAMPLE, dict(reversed(EXAMPLE.items()))):
        params, cut = comm.simulate(trained, plan, Pair, world_size=2)[1]
        torch.testing.assert_close(params, alone(Pair))
        assert {path for path in cut if cut[path]} == {"a.up.weight", "a.up.bias", "a.down.weight"}


@pytest.mark.parametrize(
    "plan",
    [
        {"up": "replicated_with_grad_allreduce", "a.up": "replicated", "experts.up": "replicated"},
        {"experts": "replicated_with_grad_allreduce", "experts.*": "replicated", "a.up": "colwise", "a.down": "rowwise"},
        {"experts": "replicated_with_grad_allreduce", "up": "colwise", "down": "rowwise"},  # the bias of down, too
    ],
)
def test_whose_gradients_are_summed(plan: dict[str, str]) -> None:
    """The nearest word says so: what the plan says of all below a module does not hold where a longer key says otherwise."""
    for params, _ in comm.simulate(trained, plan, Pair, world_size=2):
        torch.testing.assert_close(params, alone(Pair))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"0.*": "colwise", "*.down": "replicated"}, "'0.down' matches"),
        ({"up.weight": "colwise", "up.bias": "colwise", "down": "rowwise"}, "its Linear 'a.up' has no word: a layer runs as"),
        ({"up": "colwise", "a.up.bias": "replicated"}, "'a.up.bias' is 'replicated', and its Linear 'a.up' is 'colwise'"),
        ({r"a\.up\.weight": 0, "a.up": "replicated"}, "'a.up.weight' by 'a.up': 'replicated'; let one match"),
    ],
)
def test_contradictions_are_refused(plan: dict[str, Any], says: str) -> None:
    """Keys of which neither is more exact; a layer's param with another word than the layer; a dim beside a word."""
    build = Pair if "0.*" not in plan else lambda: nn.ModuleList([nn.ModuleDict({"down": nn.Linear(4, 4)})])
    with pytest.raises(ValueError, match=re.escape(says)):
        comm.simulate(trained, plan, build, world_size=2)


def test_leaves_of_no_module() -> None:
    """Words for a tree that the loss itself uses."""
    leaves = {"a": {"up": torch.arange(8.0).view(4, 2)}, "experts": {"up": torch.arange(8.0).view(4, 2)}}

    def loss(p: Any, x: Tensor) -> Tensor:
        hidden = fds.tp.column(x, p["a"]["up"]).sum()
        return comm.reduce_from(hidden) + (x @ p["experts"]["up"].t()).sum()

    def program() -> Any:
        plan = {"up": "colwise", "experts.up": "replicated"}
        step = T.tensor_parallel(plan)(fds.train_step(loss, fds.sgd(0.1)))
        state, metrics = step(step.init(leaves), torch.ones(3, 2))
        return metrics["loss"].item(), state.params["experts"]["up"].shape

    assert comm.simulate(program, world_size=2) == [(168.0, (4, 2))] * 2
