"""Ranks that train together compare their steps at init; ranks that train alone although there are others are told so."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.comm.agreement.description import described
from functional_ds.step import guards

Strategy = tuple[Any, tuple[fds.Transform, ...]]


def loss(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


def weights() -> dict[str, Tensor]:
    return {"w": torch.arange(8.0).view(4, 2) / 8, "b": torch.zeros(2)}


def rows() -> Tensor:
    return torch.arange(8.0).view(2, 4) + comm.world().rank


def descent(lr: float) -> fds.Optimizer:
    """A rule whose number is in a closure alone."""

    def update(params: list[Tensor], grads: fds.Weighted, state: Any, rate: Any) -> tuple[list[Tensor], Any]:
        return [p - lr * rate * g / grads.weight for p, g in zip(params, grads.sum, strict=True)], state

    return fds.Optimizer(lambda params: (), update, "descent", elementwise=True)


def down(to: float) -> Callable[[Tensor], float]:
    return lambda count: to


class Constant:
    """A schedule that is an object."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, count: Tensor) -> float:
        return self.factor


def scaled(by: float) -> Callable[..., Any]:
    return lambda grads, memory, group: ([by * grad for grad in comm.all_reduce(grads, group, op="avg")], memory)


ADAM = fds.adamw(0.01)
# What the others have, what the odd rank has, and what the error says of it.
OTHERS: dict[str, tuple[Strategy, Strategy, str]] = {
    "rate": ((ADAM, (T.zero(1),)), (fds.adamw(0.1), (T.zero(1),)), r"optimizer: .*adamw\(lr=0.01,.*adamw\(lr=0.1,"),
    "optimizer": ((ADAM, (T.zero(1),)), (fds.sgd(0.01), (T.zero(1),)), r"optimizer: .*adamw\(.*sgd\("),
    "closure": ((descent(0.1), (T.zero(1),)), (descent(0.2), (T.zero(1),)), r"optimizer: .*lr': 0.1.*lr': 0.2"),
    "groups": (
        (fds.param_groups({"b": fds.sgd(0.1)}, ADAM), (T.zero(3),)),
        (fds.param_groups({"b": fds.sgd(0.3)}, ADAM), (T.zero(3),)),
        r"optimizer: .*sgd\(lr=0.1.*sgd\(lr=0.3",
    ),
    "stage": ((ADAM, (T.zero(1),)), (ADAM, (T.zero(3),)), r"transforms: .*zero\(1, world\).*zero\(3, world\)"),
    "argument": ((ADAM, (T.zero(3),)), (ADAM, (T.zero(3, prefetch=2),)), r"transforms: .*zero\(3, world\).*prefetch=2"),
    "clip": ((ADAM, (T.zero(1),)), (ADAM, (T.zero(1), T.clip(1.0))), r"transforms: .*zero\(1, world\) -> clip\(1.0\)"),
    "micro-batches": (
        (ADAM, (T.accumulate(2), T.zero(1))),
        (ADAM, (T.accumulate(1), T.zero(1))),
        r"accumulate\(2\) -> .*accumulate\(1\) -> ",
    ),
    "precision": ((ADAM, (T.zero(1),)), (ADAM, (T.mixed_precision("bf16"), T.zero(1))), r"transforms: .*mixed_precision\("),
    "schedule": (
        (ADAM, (T.schedule(T.warmup_cosine(2, 6)), T.zero(1))),
        (ADAM, (T.schedule(T.warmup_cosine(2, 8)), T.zero(1))),
        r"warmup_cosine\(2, 6, floor=0.0.*warmup_cosine\(2, 8, floor=0.0",
    ),
    "own schedule": (
        (ADAM, (T.schedule(down(0.5)), T.zero(1))),
        (ADAM, (T.schedule(down(0.25)), T.zero(1))),
        r"transforms: .*'to': 0.5.*'to': 0.25",
    ),
    "schedule that is an object": (
        (ADAM, (T.schedule(Constant(0.5)), T.zero(1))),
        (ADAM, (T.schedule(Constant(0.25)), T.zero(1))),
        r"transforms: .*Constant\{'factor': 0.5\}.*Constant\{'factor': 0.25\}",
    ),
    "combination": (
        (ADAM, (T.replicated(reduce=scaled(1.0)),)),
        (ADAM, (T.replicated(reduce=scaled(2.0)),)),
        r"transforms: .*'by': 1.0.*'by': 2.0",
    ),
    "codec": (
        (ADAM, (T.compressed_gradients(comm.codecs.TopK(0.5)),)),
        (ADAM, (T.compressed_gradients(comm.codecs.TopK(0.25)),)),
        r"transforms: .*TopK\(fraction=0.5.*TopK\(fraction=0.25",
    ),
    "way": (
        (ADAM, (T.zero(0),)),
        (ADAM, (T.compressed_gradients(comm.codecs.OneBit()),)),
        r"zero\(0, world\).*compressed_gradients",
    ),
    "options": (
        (ADAM, (T.zero(1), fds.wrap("half(gradients)", options={"by": 2.0}))),
        (ADAM, (T.zero(1), fds.wrap("half(gradients)", options={"by": 3.0}))),
        r"half\(by=2.0\).*half\(by=3.0\)",
    ),
}


def begun(usual: Strategy, other: Strategy, odd: int) -> str:
    rule, strategy = other if comm.world().rank == odd else usual
    step = fds.compose(*strategy)(fds.train_step(loss, rule))
    try:
        step.init(weights())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", OTHERS)
@given(odd=st.integers(0, 2), seed=st.integers(0, 9))
def test_every_rank_names_what_differs_and_where(case: str, odd: int, seed: int) -> None:
    usual, other, says = OTHERS[case]
    rest = ", ".join(str(rank) for rank in range(3) if rank != odd)
    for said in comm.simulate(begun, usual, other, odd, world_size=3, seed=seed):
        assert said.startswith("init: ranks that train together have different steps. ")
        assert re.search(rf"ranks {rest} have ", said), said
        assert f"rank {odd} has " in said
        assert re.search(says, said, re.DOTALL) or re.search(swapped(says), said, re.DOTALL), said


def swapped(says: str) -> str:
    """The expression for the other order, in which the odd rank is the first."""
    head, *parts = says.split(".*")
    return ".*".join([head, *reversed(parts)]) if head.endswith(": ") else ".*".join(reversed([head, *parts]))


@pytest.mark.parametrize("case", ["clip", "rate"])
def test_processes_name_it(case: str) -> None:
    """Without the comparison the first of these ended in an abort of Gloo, and the second trained a shard by another rule."""
    for said in comm.spawn(begun_by_name, case, world_size=2):
        assert re.search("rank 0 has .*rank 1 has ", said), said


def begun_by_name(case: str) -> str:
    usual, other, _ = OTHERS[case]
    return begun(usual, other, 1)


@pytest.mark.parametrize("odd", range(4))
def test_a_whole_mesh_compares(odd: int) -> None:
    """Over two axes, each of which alone does not join all ranks; along the one there is only tensor parallelism."""

    def program() -> str:
        mesh = comm.mesh(dp=2, tp=2)
        strategy = T.zero(1, mesh["dp"]), T.tensor_parallel({"w": 1, "b": 0}, mesh["tp"])
        return begun((ADAM, strategy), (fds.adamw(0.1), strategy), odd)

    rest = ", ".join(str(rank) for rank in range(4) if rank != odd)
    for said in comm.simulate(program, world_size=4):
        assert f"ranks {rest} have adamw(lr=0.01" in said
        assert f"rank {odd} has adamw(lr=0.1" in said


def test_stages_of_a_pipeline_compare() -> None:
    def program(other: bool) -> str:
        params = [{"w": torch.tensor(2.0)}, {"w": torch.tensor(3.0)}]
        model = pp.stages([lambda p, x: x * p["w"]] * 2, params, loss=lambda y, batch: y.mean())
        odd = comm.world().rank == 1
        schedule = pp.gpipe(2, 4) if odd and other else pp.one_f_one_b(2, 4)
        step = T.pipeline(schedule, model)(fds.train_step(model, fds.sgd(0.2 if odd and not other else 0.1)))
        try:
            step.init(params)
        except ValueError as error:
            return str(error)
        return ""

    for said in comm.simulate(program, False, world_size=2):
        assert "optimizer: rank 0 has sgd(lr=0.1" in said
    for said in comm.simulate(program, True, world_size=2):
        assert "transforms: rank 0 has pipeline(placement=[0, 1], microbatches=4, actions=" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, r"seed: rank 0 has 0; rank 1 has 1"),
        ({"buffers": "mean"}, r"buffers: rank 0 has 'first'; rank 1 has 'mean'"),
        ({"unused": "zeros"}, r"unused: rank 0 has 'skip'; rank 1 has 'zeros'"),
    ],
)
def test_arguments_of_the_step(change: dict[str, Any], says: str) -> None:
    def program() -> None:
        T.zero(2)(fds.train_step(loss, ADAM, **(change if comm.world().rank else {}))).init(weights())

    with pytest.raises(ValueError, match=says):
        comm.simulate(program, world_size=2)


def test_another_version_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "version", lambda name: f"0.{comm.world().rank}")
    with pytest.raises(ValueError, match=r"functional_ds: rank 0 has 0.0; rank 1 has 0.1"):
        comm.simulate(lambda: T.zero(0)(fds.train_step(loss, ADAM)).init(weights()), world_size=2)


def test_what_is_a_ranks_own_is_no_difference(tmp_path: Path) -> None:
    """Groups and their names, batches, losses, folders, and whatever these have in their closures."""

    def program() -> int:
        here = comm.world().rank
        mesh = comm.mesh(dp=2, tp=2)
        rank_of = {name: mesh[name].rank for name in ("dp", "tp")}
        row = comm.new_group([here % 2, here % 2 + 2], f"column {here % 2}")

        def own(params: Any, x: Tensor) -> Tensor:
            return loss(params, x) * (1 + 0 * here * rank_of["dp"])

        folder = tmp_path / f"rank{here}"
        folder.mkdir(exist_ok=True)
        strategy = (
            T.offload("disk", path=folder),
            T.zero(1, row),
            T.tensor_parallel({"w": 1, "b": 0}, mesh["tp"]),
            T.schedule(down(0.5)),
        )
        step = fds.compose(*strategy)(fds.train_step(own, fds.param_groups({lambda path: path == "b": fds.sgd(0.1)}, ADAM)))
        step.init(weights())
        return len(step.init(weights()).params)

    assert comm.simulate(program, world_size=4) == [1] * 4


def test_the_comparison_costs_sixteen_bytes() -> None:
    """One all-reduce of two numbers over each group; none without groups, and none on one rank."""

    def program(*strategy: fds.Transform) -> list[tuple[str, str, int]]:
        step = fds.compose(*strategy)(fds.train_step(loss, ADAM))
        with comm.ledger() as sent:
            guards.GUARDS["init"][-1](step)
        return [(row.collective, row.group, row.bytes) for row in sent.rows]

    assert comm.simulate(program, T.zero(1), T.clip(1.0), world_size=2)[0] == [("all_reduce", "world/control", 16)]
    assert comm.simulate(program, T.clip(1.0), world_size=2)[0] == []
    assert program(T.zero(1)) == []


def test_ranks_without_values_are_compared_afterwards() -> None:
    def program() -> None:
        step = T.zero(1)(fds.train_step(loss, fds.sgd(0.1 if comm.world().rank else 0.2)))
        step.init({name: leaf.to("meta") for name, leaf in weights().items()})

    with pytest.raises(
        comm.errors.MismatchError, match=r"rank 0 called a step of sgd\(lr=0.2.*rank 1 called a step of sgd\(lr=0.1"
    ):
        comm.simulate(program, world_size=2, shapes_only=True)


class Table:
    """No record: an object of a rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


@given(
    one=st.floats(0, 1),
    other=st.floats(0, 1),
    names=st.lists(st.text(max_size=3), max_size=3),
    power=st.sampled_from([torch.float32, torch.int64]),
)
def test_described_tells_numbers_apart_and_nothing_else(one: float, other: float, names: list[str], power: torch.dtype) -> None:
    def rule(rank: int, number: float) -> Any:
        table, values = Table(rank), torch.full((3,), 1, dtype=power)

        def update(x: Any) -> Any:
            return table, values, names, fds.adamw, lambda y: y * number

        return update

    texts = [described(rule(rank, number)) for rank, number in ((0, one), (1, one), (0, other))]
    assert texts[0] == texts[1]
    assert (texts[0] == texts[2]) == (repr(one) == repr(other))
    assert " at 0x" not in texts[0]


@pytest.mark.parametrize(
    "rule",
    [
        fds.one_bit_adam(0.1, warmup=1),
        fds.zero_one_adam(0.1, freeze=1, local=2, longest=2),
        fds.muon(0.1, fds.lamb(0.1)),
        fds.param_groups({"b": fds.lion(0.1)}, fds.adamw(0.1, decay="w")),
    ],
    ids=lambda rule: rule.name[:10],
)
def test_descriptions_are_short(rule: Any) -> None:
    """Some optimizers hold endless ranges; functions share their parts."""
    assert len(described(rule)) < 10_000


# -- ranks that train alone -----------------------------------------------------------------------------------------------


def alone(*strategy: fds.Transform, steps: int = 2) -> list[str]:
    """What is said of this rank's steps."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1)))
        state = step.init(weights())
        for _ in range(steps):
            state, _ = step(state, rows())
    return [f"{warning.category.__name__} {warning.filename}: {warning.message}" for warning in told]


def test_ranks_that_send_nothing_are_told_once() -> None:
    told, other = comm.spawn(alone, world_size=2)
    (said,) = told
    assert re.search(r"^UserWarning .*test_agreement.py: train_step\(loss.*the first step has sent nothing.*T.zero\(0\)", said)
    assert other == []


def summed(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
    state, grads = inner(step, state, grads)
    return state, comm.all_reduce(grads)


def who_send_or_mean_it() -> list[list[str]]:
    deliberate = T.zero(0, comm.new_group([comm.world().rank]))
    return [alone(T.zero(0)), alone(fds.wrap("mine", reduce=summed)), alone(deliberate)]


def test_who_sends_or_means_it_is_told_nothing() -> None:
    """Data parallelism of the library and a user's own, a group of one rank, a world of one, and simulated ranks."""
    assert comm.spawn(who_send_or_mean_it, world_size=2) == [[[], [], []]] * 2
    assert comm.simulate(alone, world_size=2) == [[], []]
    assert alone() == []
