"""Many interleavings: programs that agree in all, that do not, and that stop in some."""

import re
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm
from functional_ds.comm.debug.explore import explore
from functional_ds.comm.table.errors import DivergenceError
from functional_ds.testing import Inputs, assert_same, inputs


def asked_first() -> bool:
    """Whether the other rank had called what this one polls for; each polls before it calls what the other one polls for."""
    here = comm.world()
    mine, theirs = (here.channel(name) for name in ("ab" if here.rank == 0 else "ba"))
    done = comm.start(comm.all_reduce, torch.ones(1), mine).poll(1.0)
    comm.all_reduce(torch.ones(1), theirs)
    return done


def runs(program: Any, seeds: int) -> list[Any]:
    """What the first so many seeds give, an error as its type."""

    def run(seed: int) -> Any:
        try:
            return comm.simulate(program, world_size=2, seed=seed)
        except comm.errors.CommError as error:
            return type(error)

    return [run(seed) for seed in range(seeds)]


# -- programs that agree ----------------------------------------------------------------------------------------------


@given(inputs(), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_a_program_of_collectives_agrees(case: Inputs, seeds: list[int]) -> None:
    """explore(program) = simulate(program, seed=s) for every s."""

    def program() -> Any:
        x = case.of(comm.world().rank)
        return comm.all_reduce(x), comm.all_gather(x, tiled=False), comm.world().rank

    results = explore(program, world_size=case.size, seeds=seeds)
    for result, expected in zip(results, comm.simulate(program, world_size=case.size, seed=case.seed), strict=True):
        assert_same(result, expected)


@pytest.mark.parametrize(("seeds", "tried"), [(7, 7), ([3, 5], 2), ((seed for seed in (9, 8, 7)), 3), (1, 1)])
def test_every_seed_is_tried(seeds: Any, tried: int) -> None:
    """A number is so many seeds; any iterable of seeds will do."""
    calls: list[int] = []
    assert explore(lambda: calls.append(comm.world().rank), world_size=3, seeds=seeds) == [None] * 3
    assert sorted(calls) == sorted([0, 1, 2] * tried)


@pytest.mark.parametrize("seeds", [0, -3, ()])
def test_no_seed_is_refused(seeds: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"seeds={seeds!r}: name at least one seed, or how many to try")):
        explore(lambda: None, world_size=2, seeds=seeds)


def test_runs_start_from_one_generator_state() -> None:
    """Each rank draws the same in every run, and the caller's generator stays where it was."""
    before = torch.get_rng_state()
    explore(lambda: comm.all_reduce(torch.rand(3)), world_size=2, seeds=5)
    assert torch.equal(torch.get_rng_state(), before)


# -- arguments --------------------------------------------------------------------------------------------------------


def test_each_run_has_its_own_tensors() -> None:
    """A program that writes into its tensors does so in its run alone; what is shared stays shared."""
    x = torch.zeros(4)
    given = {"x": x, "same": x, "view": x[1:], "name": "w"}

    def program(tree: dict[str, Any]) -> tuple[Any, ...]:
        if comm.world().rank == 0:
            tree["x"].add_(1)
            tree["new"] = 1
        comm.barrier()
        return tree["same"], tree["view"], tree["name"]

    for same, view, name in explore(program, given, world_size=2, seeds=4):
        assert_same((same, view), (torch.ones(4), torch.ones(3)))
        assert name == "w"
    assert_same(x, torch.zeros(4))
    assert set(given) == {"x", "same", "view", "name"}


def test_gradients_reach_the_arguments() -> None:
    """Leaves of an autograd graph, parameters and inner nodes alike."""
    leaf, inner = torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 1

    def program(a: Any, b: Any) -> Any:
        return type(a).__name__, torch.autograd.grad(comm.all_reduce(2 * a + 3 * b).sum(), (a, b))

    for kind, grads in explore(program, leaf, inner, world_size=2, seeds=3):
        assert kind == "Parameter"
        assert_same(grads, (torch.full((2,), 4.0), torch.full((2,), 6.0)))


# -- programs that do not agree ---------------------------------------------------------------------------------------


def test_a_result_that_depends_on_the_interleaving_is_reported() -> None:
    """Both seeds give what the message says, and no seed before the second differs from the first."""
    results = runs(asked_first, 30)
    other = next(seed for seed, result in enumerate(results) if result != results[0])
    rank = next(rank for rank in range(2) if results[0][rank] != results[other][rank])
    with pytest.raises(DivergenceError) as caught:
        explore(asked_first, world_size=2, seeds=30)
    assert str(caught.value) == (
        f"the result depends on the interleaving: rank {rank}'s result is {results[0][rank]} with seed 0 and "
        f"{results[other][rank]} with seed {other}; comm.simulate(..., world_size=2, seed={other}) gives it again"
    )


def test_the_first_rank_that_differs_is_named() -> None:
    """Not only rank 0 counts."""

    def program() -> bool:
        done = asked_first()
        return done and comm.world().rank == 1

    with pytest.raises(DivergenceError, match="rank 1's result is"):
        explore(program, world_size=2)


NAN = torch.tensor(float("nan"))
OTHER_NAN = (NAN.view(torch.int32) + 1).view(torch.float32)
ZEROS = torch.zeros(2, 3, dtype=torch.complex64)

DIFFERENT: dict[str, tuple[Any, Any, str, str, str]] = {
    "values": (torch.tensor([1, 2]), torch.tensor([1, 3]), ", element [1] of int64[2]", "2", "3"),
    "zeros": (torch.tensor(0.0), torch.tensor(-0.0), "", "0.0", "-0.0"),
    "zeros in a tree": ([1, {"w": ZEROS}], [1, {"w": -ZEROS}], "[1]['w'], element [0, 0] of complex64[2, 3]", "0j", "(-0-0j)"),
    "nans": (NAN, OTHER_NAN, "", "nan (0000c07f)", "nan (0100c07f)"),
    "dtypes": (torch.tensor([0]), torch.tensor([0.0]), "", "int64[1]", "float32[1]"),
    "shapes": (torch.ones(2), torch.ones(2, 1), "", "float32[2]", "float32[2, 1]"),
    "floats": ((1, 0.0), (1, -0.0), "[1]", "0.0", "-0.0"),
    "complex": (0j, -0j, "", "0j", "(-0-0j)"),
    "texts": ({"a": "x"}, {"a": "y"}, "['a']", "'x'", "'y'"),
    "types": (1, True, "", "1", "True"),
    "kinds": (torch.tensor(1), 1, "", "tensor(1)", "1"),
    "none": ([None], [1], "[0]", "None", "1"),
    "structures": ([1], (1,), "", "PyTreeSpec([*], NoneIsLeaf)", "PyTreeSpec((*,), NoneIsLeaf)"),
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("swapped", [False, True])
def test_what_differs_is_named(name: str, swapped: bool) -> None:
    """The place in the result, and both values; bits count, not values."""
    one, other, where, *texts = DIFFERENT[name]
    if swapped:
        one, other, texts = other, one, texts[::-1]
    at_seed_0 = runs(asked_first, 1)[0][0]
    with pytest.raises(DivergenceError) as caught:
        explore(lambda: one if asked_first() == at_seed_0 else other, world_size=2, seeds=30)
    message = (
        f"the result depends on the interleaving: rank 0's result{where} is {texts[0]} with seed 0 and {texts[1]} with seed "
    )
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_the_same_agrees(name: str) -> None:
    """Every value is the same as itself, a NaN too."""
    for value in DIFFERENT[name][:2]:
        explore(lambda value=value: value, world_size=2, seeds=3)


class Plain:
    """Equal to itself alone."""


@attrs.frozen
class Holder:
    """A record that is no pytree."""

    value: Any


def test_what_cannot_be_compared_is_refused() -> None:
    """Where it is, what it is, and what would do."""
    advice = "return tensors, numbers, texts, or pytrees of them"
    with pytest.raises(
        TypeError, match=re.escape(f"result[0]: Plain has no == of its own, so runs cannot be compared; {advice}")
    ):
        explore(lambda: [Plain()], world_size=2)
    with pytest.raises(TypeError, match=re.escape(f"result: two values of Holder cannot be compared; {advice}")):
        explore(lambda: Holder(torch.ones(2)), world_size=2)
    with pytest.raises(
        TypeError, match=r"result: a tensor of layout torch.sparse_coo cannot be compared; return it to_dense()"
    ):
        explore(lambda: torch.ones(2).to_sparse(), world_size=2)


# -- programs that stop -----------------------------------------------------------------------------------------------


def sometimes_waits_alone() -> None:
    """Deadlocks in those interleavings in which rank 0 asks in vain."""
    if not asked_first() and comm.world().rank == 0:
        comm.barrier()


def test_a_deadlock_is_reported_with_its_seed() -> None:
    """The first seed that deadlocks, and it does so again."""
    outcomes = runs(sometimes_waits_alone, 30)
    assert [None, None] in outcomes  # in some interleavings only
    bad = outcomes.index(comm.errors.DeadlockError)
    with pytest.raises(comm.errors.DeadlockError, match="rank 0 waits in barrier") as caught:
        explore(sometimes_waits_alone, world_size=2, seeds=30)
    assert caught.value.__notes__[-1] == f"seed {bad}: run comm.simulate(..., world_size=2, seed={bad}) to see it again"
    with pytest.raises(comm.errors.DeadlockError):
        comm.simulate(sometimes_waits_alone, world_size=2, seed=bad)


def sometimes_differs() -> None:
    comm.all_reduce(torch.ones(2 if asked_first() or comm.world().rank == 0 else 3))


def sometimes_raises() -> None:
    if asked_first() and comm.world().rank == 0:
        raise comm.errors.CommError("no")


@pytest.mark.parametrize(
    ("program", "error"), [(sometimes_differs, comm.errors.MismatchError), (sometimes_raises, comm.errors.CommError)]
)
def test_any_error_is_reported_with_its_seed(program: Any, error: type[Exception]) -> None:
    """Beside the note that names the rank."""
    outcomes = runs(program, 30)
    assert [None, None] in outcomes
    with pytest.raises(error) as caught:
        explore(program, world_size=2, seeds=30)
    assert type(caught.value) is error
    rank_note, seed_note = caught.value.__notes__
    assert rank_note.startswith("raised on simulated rank")
    assert seed_note.startswith(f"seed {outcomes.index(error)}: run comm.simulate(")
