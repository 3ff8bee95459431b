"""What the loss sees of a parameter is the parameter, whichever of torch's functions it calls; and what it costs in Python."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.planting import Bug, planted

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "type": lambda w: w.type(torch.float32),  # DeepSeek-V3's router, in half precision
    "type by name": lambda w: w.type("torch.FloatTensor"),
    "type by keyword": lambda w: w.type(dtype=torch.float32),
    "to": lambda w: w.to(torch.float32),
    "float": lambda w: w.float(),
    "type_as": lambda w: w.type_as(torch.ones(())),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("cast", CASTS)
def test_casts_keep_the_gradient(cast: str, stage: int) -> None:
    def program() -> list[float]:
        def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
            assert params["w"].type() == "torch.BFloat16Tensor"
            return (CASTS[cast](params["w"]) * x.float()).sum()

        step = fds.compose(T.mixed_precision("bf16"), T.zero(stage))(fds.train_step(loss, fds.sgd(0.5)))
        state, _ = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, 3.0]))
        return step.params(state)["w"].tolist()  # type: ignore[no-any-return]

    assert comm.simulate(program, world_size=2) == [[0.5, -0.5]] * 2


# -- views of a state use the same lazy tensors ----------------------------------------------------------------------------


def trained(see: Callable[[Tensor], Any], stage: int = 3) -> tuple[list[Any], list[float]]:
    """What ``see`` returns for the parameter in each of three steps, and the parameter after them."""
    seen = []

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        seen.append(see(params["w"]))
        return (params["w"] * x).sum()

    step = T.zero(stage)(fds.train_step(loss, fds.sgd(0.5)))
    state = step.init({"w": torch.ones(2)})
    for _ in range(3):
        state, _ = step(state, torch.tensor([1.0, 0.0]))
    return seen, step.params(state)["w"].tolist()


def tags_are_of_a_pass() -> None:
    tags: list[weakref.ref[Any]] = []

    def tagged(w: Any) -> bool:
        before = hasattr(w, "tag") or any(tag() is not None for tag in tags)
        w.tag = torch.ones(2)  # such as a copy of the weight in another dtype
        tags.append(weakref.ref(w.tag))
        return before

    assert trained(tagged) == ([False] * 3, [-0.5, 1.0])
    assert all(tag() is None for tag in tags)


def weak_tables_are_of_a_pass() -> None:
    table: list[weakref.ref[Tensor]] = []

    def tabled(w: Tensor) -> bool:
        before = any(known() is not None for known in table)
        table.append(weakref.ref(w))
        return before

    assert trained(tabled) == ([False] * 3, [-0.5, 1.0])
    assert all(known() is None for known in table)


def leaves_of_earlier_passes_have_no_values() -> None:
    kept: list[Tensor] = []

    def keep(w: Tensor) -> int:
        kept.append(w)
        return len(kept)

    trained(keep)
    for place in range(3):
        with pytest.raises(RuntimeError, match="a parameter of an earlier pass, whose values are gone"):
            kept[place].sum()
    assert len({id(w) for w in kept}) == 3
    table = [weakref.ref(w) for w in kept[:2]]
    kept.clear()
    assert all(known() is None for known in table)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


def calls_a_block(stage: int) -> float:
    """How many functions of the library a step calls for each more block of a model, once it has a plan."""

    def calls(blocks: int) -> int:
        apply, params = fds.functional(nn.Sequential(*[Block() for _ in range(blocks)]))
        step = T.zero(stage)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(1e-3)))
        state, batch, count = step.init(params), torch.ones(2, 4), 0

        def note(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call" and frame.f_globals.get("__name__", "").startswith("functional_ds")

        before = sys.getprofile()
        for profile in (before, before, before, note):  # on one line, whose number is looked up once
            sys.setprofile(profile)
            try:
                state, _ = step(state, batch)
            finally:
                sys.setprofile(before)
        return count

    return (calls(6) - calls(2)) / 4


def host_time_is_bounded(world_size: int, stage: int) -> None:
    for found in comm.simulate(calls_a_block, stage, world_size=world_size):
        assert found <= HOST_CALLS[world_size, stage]


HOST_CALLS = {(1, 0): 59, (1, 3): 59, (2, 0): 176, (2, 3): 514}  # of two ranks with those of the simulator


@pytest.mark.parametrize(("world_size", "stage"), HOST_CALLS)
def test_a_step_makes_few_calls_a_block(world_size: int, stage: int) -> None:
    host_time_is_bounded(world_size, stage)


@pytest.mark.parametrize(
    "law",
    [tags_are_of_a_pass, weak_tables_are_of_a_pass, leaves_of_earlier_passes_have_no_values],
    ids=lambda law: law.__name__,
)
def test_passes_notice_nothing_of_each_other(law: Callable[[], None]) -> None:
    law()


def test_a_trace_that_is_given_up_leaves_them_to_the_next_pass() -> None:
    def losses(step: Any) -> list[float]:
        state, found = step.init({"v": torch.ones(2), "w": torch.ones(2)}), []
        for _ in range(4):
            state, metrics = step(state, torch.ones(2))
            found.append(metrics["loss"].item())
        return found

    step = T.zero(3)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.1)))
    with pytest.warns(UserWarning, match="the step runs eagerly: .* does not use 'v'"):
        found = losses(fds.jit(step))
    assert found == pytest.approx(losses(step))


FIT = "transforms.zero.units.lazy_tensor:LazyLeaves.fit"
CLOSE = "transforms.zero.lazy_params:LazyParams.close"
MARKED = "transforms.zero.units.lazy_tensor:LazyLeaves.marked"
UNSET = "{*map(len, map(vars, self.tensors))} <= {len(LazyTensor.__annotations__)}"


@pytest.mark.parametrize(
    ("law", "args", "bug"),
    [
        (tags_are_of_a_pass, (), Bug("attributes stay", MARKED, UNSET, "True")),
        (
            weak_tables_are_of_a_pass,
            (),
            Bug("weak references stay", MARKED, "any(map(getweakrefcount, self.tensors))", "False"),
        ),
        (
            leaves_of_earlier_passes_have_no_values,
            (),
            Bug("kept ones go on", FIT, "any(held_elsewhere(self.tensors))", "False"),
        ),
        (leaves_of_earlier_passes_have_no_values, (), Bug("they stay", CLOSE, "del self._placeholders", "pass")),
        (tags_are_of_a_pass, (), Bug("tags stay to the next pass", CLOSE, "not self._placeholders.marked", "True")),
        (weak_tables_are_of_a_pass, (), Bug("tables stay to the next pass", CLOSE, "not self._placeholders.marked", "True")),
        (host_time_is_bounded, (1, 3), Bug("each view makes its own", MARKED, UNSET, "False")),
        (
            host_time_is_bounded,
            (2, 3),
            Bug(
                "units are looked through at each use",
                "transforms.zero.gather:Gatherer._sharded",
                "unit not in self._to_gather",
                "True",
            ),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Bug) else "",
)
def test_planted_bugs_of_lazy_leaves_are_found(law: Callable[..., None], args: tuple[int, ...], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law(*args)
