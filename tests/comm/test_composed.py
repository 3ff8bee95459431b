"""Functions made of collectives as collectives: started, in zero, counted, in graphs."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.comm import algorithms
from functional_ds.comm.algorithms.cost import Load, counted, sent
from functional_ds.testing import Problem, assert_same
from tests.planting import Bug, planted

PROBLEM = Problem()
NAMES = ["ring", "tree", "double_tree", "recursive_doubling", "halving_doubling"]


def butterfly(x: Any, group: Any = None) -> Any:
    """A custom all-reduce, in which ranks at distance 1, 2, 4, ... exchange sums; for 2, 4, 8, ... ranks."""
    group = group or comm.world()
    for level in range(group.size.bit_length() - 1):
        partner = comm.Permutation((rank, rank ^ (1 << level)) for rank in range(group.size))
        x = fds.tree.map(torch.add, x, comm.permute(x, partner, group))
    return x


def gathered(x: Any, group: Any) -> Any:
    """An all-gather by broadcasts."""
    rooms = [fds.tree.map(torch.clone, x) for _ in range(group.size)]
    parts = [comm.broadcast(room, rank, group) for rank, room in enumerate(rooms)]
    return fds.tree.map(lambda *pieces: torch.cat(pieces), *parts)


def scattered(x: Any, group: Any, *, tiled: bool) -> Any:
    """A reduce-scatter by an all-reduce."""
    return fds.tree.map(lambda rows: butterfly(rows, group)[group.rank], x)


class Halves:
    """A custom codec: what is sent is in fp16."""

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (rows.half(),)

    def decode(self, parts: Any, size: int, dtype: torch.dtype) -> Tensor:
        found: Tensor = parts[0].to(dtype)
        return found


def started_beside(function: Callable[..., Any], variance: bool, seed: int) -> None:
    def program() -> Any:
        rank = comm.world().rank
        x = {"a": torch.arange(7.0) * (rank + 1), "b": torch.tensor([rank])}
        leaf = (torch.arange(3.0) + rank).requires_grad_()
        first, second = comm.start(function, x), comm.start(function, x["a"], comm.world(), op="max")
        if rank == 0:
            first.wait()
        between = comm.all_reduce(x["a"])  # on a channel of its own, before or after
        (grad,) = torch.autograd.grad((comm.start(function, leaf).wait() * (rank + 1)).sum(), leaf)
        return first.wait(), second.wait(), between, grad, function(x), comm.all_reduce(x), comm.all_reduce(x["a"], op="max")

    for first, second, between, grad, plain, total, most in comm.simulate(program, world_size=3, seed=seed, variance=variance):
        assert_same((first, second, between), (plain, most, total["a"]))
        assert_same(plain, total)
        assert grad.tolist() == [6.0] * 3


@pytest.mark.law(39)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 99))
def test_started_it_is_what_it_is(name: str, seed: int) -> None:
    """start(f, x).wait() = f(x) = AR, beside other calls of the same ranks, and with gradients."""
    started_beside(getattr(algorithms, name), False, seed)


def test_values_are_followed_through_it() -> None:
    started_beside(algorithms.ring, True, 0)


def trained(*strategy: fds.Transform, wrap: Callable[[fds.Step], fds.Step] = lambda step: step) -> Any:
    step = wrap(fds.compose(*strategy)(fds.train_step(PROBLEM.loss, fds.adamw(0.05))))
    state, here = step.init(PROBLEM.params), comm.world()
    for batch in PROBLEM.batches[:3]:
        state, _ = step(state, batch.chunk(here.size)[here.rank])
    return step.params(state)


OWN: dict[str, Callable[[], fds.Transform]] = {
    "ring": lambda: T.zero(0, all_reduce=algorithms.ring),
    "tree of options": lambda: T.zero(0, all_reduce=partial(algorithms.double_tree, chunks=2)),
    "own all_reduce": lambda: T.zero(0, all_reduce=butterfly),
    "own all_reduce, shards": lambda: T.zero(2, aggregate="all_reduce", all_reduce=butterfly),
    "own in stage 1": lambda: T.zero(1, all_gather=gathered, reduce_scatter=scattered),
    "own in stage 3": lambda: T.zero(3, all_gather=gathered, reduce_scatter=scattered),
    "own, two levels": lambda: T.zero(3, intra_node=2, all_gather=gathered, reduce_scatter=scattered),
    "replicas": lambda: T.zero(0, comm.mesh(a=2, b=2)["b"], replicate=comm.mesh(a=2, b=2)["a"], all_reduce=algorithms.tree),
}


@pytest.mark.law(19)
@pytest.mark.parametrize("name", sorted(OWN))
def test_zero_takes_them(name: str) -> None:
    alone = trained()
    for seed in range(2):
        for found in comm.simulate(lambda: trained(OWN[name](), T.clip(0.5)), world_size=4, seed=seed):
            torch.testing.assert_close(found, trained(T.clip(0.5)))
        for found in comm.simulate(lambda: trained(OWN[name]()), world_size=4, seed=seed):
            torch.testing.assert_close(found, alone)


def test_a_codec_of_ones_own() -> None:
    """Its bytes, and values within its rounding."""

    def program(codec: Any) -> Any:
        with comm.ledger() as book:
            found = trained(T.zero(1, reduce_scatter=comm.codecs.compressed(comm.reduce_scatter, codec)))
        return found, book.bytes

    (exact, most), (near, fewer) = (
        comm.simulate(program, c, world_size=2)[0] for c in (comm.codecs.Cast(torch.float32), Halves())
    )
    assert fewer < most
    torch.testing.assert_close(near, exact, rtol=0.02, atol=0.02)


def test_in_a_graph() -> None:
    eager = comm.simulate(lambda: trained(OWN["ring"]()), world_size=2)
    assert_same(comm.simulate(lambda: trained(OWN["ring"](), wrap=fds.jit), world_size=2), eager)


@pytest.mark.law(39)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_what_is_counted_is_the_formula(name: str, n: int) -> None:
    wanted = [sent(name, 24, n, rank) for rank in range(n)]
    found = counted(getattr(algorithms, name), n, torch.empty(24, device="meta"))
    assert [load.bytes for load in found] == [4.0 * load.elements for load in wanted]
    assert all(load.messages >= one.messages for load, one in zip(found, wanted, strict=True))
    if "tree" not in name and n in (1, 2, 8):  # else some calls are received alone
        assert [load.messages for load in found] == [load.messages for load in wanted]


def test_own_functions_are_counted() -> None:
    assert counted(butterfly, 8, torch.empty(10, device="meta")) == [Load(3, 120.0)] * 8
    with pytest.raises(ValueError, match="n=0: a group has at least one rank"):
        counted(butterfly, 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: T.zero(0, all_reduce=lambda x: x),
            r"all_reduce=<lambda> takes \(x\), and zero calls it as <lambda>\(x, group\)",
        ),
        (lambda: T.zero(1, reduce_scatter=butterfly), r"reduce_scatter=butterfly takes .*\(x, group, tiled=False\)"),
        (lambda: T.zero(0, all_reduce=3), "all_reduce=3 is not a collective"),  # type: ignore[arg-type]
    ],
)
def test_other_functions_are_refused_at_once(make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make()


BUGS = [
    Bug(
        "it runs on the program's own channel",
        "comm.composed:composed.described.begin",
        "x.channel(name) if isinstance(x, Group) else x",
        "x",
    ),
    Bug("gradients get lost", "comm.composed:composed.described.begin", "torch.is_grad_enabled()", "False"),
]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    def run() -> None:
        for seed in range(20):
            started_beside(comm.table.composed(inspect.unwrap(algorithms.ring)), False, seed)

    with planted(bug), pytest.raises((AssertionError, RuntimeError, comm.errors.CommError)):
        run()
