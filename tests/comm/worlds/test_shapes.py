"""Simulations without values: the shapes, dtypes and ledger of a run with values, on thousands of ranks."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm, tree
from functional_ds.testing import seeds
from tests.comm import cases

HERE = Path(__file__).name
META = torch.device("meta")


def rank() -> int:
    return comm.world().rank


def on_shapes(program: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    return comm.simulate(program, *args, world_size=world_size, shapes_only=True)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def kinds(x: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape, leaf.dtype) for leaf in tree.leaves(x)]


# -- what it agrees with ----------------------------------------------------------------------------------------------


def known(case: cases.Case) -> cases.Case | None:
    """The case, asked so that the sizes of the result follow from the arguments: without values, no sizes can be exchanged."""
    if case.options.get("uneven"):
        return None
    if case.name == "all_to_all_rows":
        case.options["both"] = True
    return case


def call(case: cases.Case, device: str) -> tuple[Any, comm.Ledger]:
    """One call, with its gradient and its gradient's where it has them, and the ledger of all."""
    here = comm.world()
    with comm.ledger() as book:
        if case.name == "barrier":
            return comm.barrier(), book
        x = tree.map(lambda leaf: leaf.to(device), case.values(here.rank))
        if cases._has_template(case, here.rank):
            x = cases._piece_of(x, here.size, case.options)
        if not case.gradient:
            return cases._call(case, x, here), book
        x = tree.map(lambda leaf: leaf.clone().requires_grad_(), x)
        out = cases._call(case, x, here)
        cotangents = [torch.ones_like(leaf).requires_grad_() for leaf in tree.leaves(out)]
        if not cotangents:
            return out, book
        back = torch.autograd.grad(tree.leaves(out), tree.leaves(x), cotangents, create_graph=True, allow_unused=True)
        back = [leaf for leaf in back if leaf is not None]
        again = torch.autograd.grad(back, cotangents, [leaf.detach() for leaf in back])
        return (out, back, list(again)), book


@given(st.integers(1, 4), seeds())
def test_shapes_are_those_of_a_run_with_values(world_size: int, seed: int) -> None:
    """For every row of the table: shapes, dtypes and structures of results and gradients, and the ledger's rows."""
    for case in filter(None, map(known, cases.draw(len(comm.table.TABLE), world_size, seed))):
        real = comm.simulate(call, case, "cpu", world_size=world_size)
        model = on_shapes(call, case, "meta", world_size=world_size)
        for (value, book), (shaped, shaped_book) in zip(real, model, strict=True):
            assert tree.structure(shaped) == tree.structure(value), case
            assert kinds(shaped) == kinds(value), case
            assert all(leaf.is_meta for leaf in tree.leaves(shaped)), case
            assert shaped_book.rows == book.rows, case


def test_modules_run_on_shapes() -> None:
    """A whole data-parallel step on meta tensors sends what the real one sends."""

    def step(device: str) -> comm.Ledger:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
        with comm.ledger() as book:
            loss = comm.all_reduce(model(torch.ones(3, 8, device=device)).square().sum())
            loss.backward()
            comm.all_reduce([parameter.grad for parameter in model.parameters()], op="avg")
        return book

    real, model = comm.simulate(step, "cpu", world_size=3), on_shapes(step, "meta", world_size=3)
    assert [book.rows for book in real] == [book.rows for book in model]
    assert real[0].bytes > 0


def test_a_thousand_ranks() -> None:
    """On a mesh of 10 x 100, with messages around a ring: results in rank order and the textbook's bytes."""

    def program() -> tuple[int, int, tuple[int, ...]]:
        mesh, x = comm.mesh(a=10, b=100), meta(1000)
        with comm.ledger() as book:
            piece = comm.reduce_scatter(x, mesh["b"])
            comm.all_reduce(piece, mesh["a"])
            whole = comm.all_gather(piece, mesh["b"])
            comm.batch_p2p([comm.Send(x, (rank() + 1) % 1000), comm.Recv(x, (rank() - 1) % 1000)])
        return rank(), book.bytes, tuple(whole.shape)

    per_rank = 4 * (2 * 990 + 2 * 9 + 1000)  # RS and AG of 1000 over 100; AR of 10 over 10; one message
    assert on_shapes(program, world_size=1000) == [(r, per_rank, (1000,)) for r in range(1000)]


# -- loops ------------------------------------------------------------------------------------------------------------


def loops(times: int, repeat: Callable[[int, Callable[[int], None]], None], device: str) -> tuple[Any, int]:
    """A ring, a loop inside of a loop, rows, and a group that is first used inside."""
    n, x = comm.world().size, [torch.full((4,), float(rank()), device=device)]
    ring = comm.Permutation.shift(n)
    ran: list[int] = []

    def inner(i: int) -> None:
        comm.all_reduce(x[0], comm.world().channel("inner"))

    def body(i: int) -> None:
        ran.append(i)
        x[0] = comm.permute(x[0], ring)
        comm.all_to_all(x[0].repeat(n), input_splits=[4] * n, output_splits=[4] * n)
        repeat(2, inner)

    with comm.ledger() as outer:
        comm.all_reduce(x[0])
        with comm.ledger() as book:
            repeat(times, body)
        comm.all_reduce(x[0])
    return (x[0], outer.rows, book.rows), len(ran)


def plainly(times: int, body: Callable[[int], None]) -> None:
    for i in range(times):
        body(i)


@given(st.integers(1, 3), st.integers(0, 3))
def test_a_loop_is_counted_as_often_as_it_would_run(n: int, times: int) -> None:
    """repeat(k, body) = for i in range(k): body(i), in values, ledgers and nested; on shapes it runs once."""
    plain = comm.simulate(loops, times, plainly, "cpu", world_size=n)
    assert [(value.tolist(), *rows) for (value, *rows), _ in comm.simulate(loops, times, comm.repeat, "cpu", world_size=n)] == [
        (value.tolist(), *rows) for (value, *rows), _ in plain
    ]
    for ((value, *rows), ran), ((shaped, *counted), ran_once) in zip(
        plain, on_shapes(loops, times, comm.repeat, "meta", world_size=n), strict=True
    ):
        assert (shaped.shape, counted) == (value.shape, rows)
        assert (ran, ran_once) == (times, min(times, 1))


def test_loops_of_different_lengths_are_a_mismatch() -> None:
    """A repeat and a plain loop of one length agree; of two lengths they do not."""

    def program(lengths: tuple[int, int]) -> None:
        loops(lengths[rank()], (comm.repeat, plainly)[rank()], "meta")

    on_shapes(program, (3, 3), world_size=2)
    with pytest.raises(comm.errors.MismatchError, match=r"rank 1 called permute|rank 0 called permute"):
        on_shapes(program, (3, 2), world_size=2)
    with pytest.raises(ValueError, match="times=-1: a loop runs 0 times or more"):
        comm.repeat(-1, lambda i: None)


# -- what does not fit ------------------------------------------------------------------------------------------------

MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "name": (
        lambda: comm.all_reduce(meta(2)),
        lambda: comm.broadcast(meta(2)),
        "all_reduce(op='sum') of [float32[2]]",
        "broadcast(src=0) of [float32[2]]",
    ),
    "shape": (
        lambda: comm.all_reduce(meta(2)),
        lambda: comm.all_reduce(meta(3)),
        "all_reduce(op='sum') of [float32[2]]",
        "all_reduce(op='sum') of [float32[3]]",
    ),
    "dtype": (
        lambda: comm.all_gather(meta(2)),
        lambda: comm.all_gather(meta(2, dtype=torch.int8)),
        "all_gather(dim=0, tiled=True) of [float32[2]]",
        "all_gather(dim=0, tiled=True) of [int8[2]]",
    ),
    "options": (
        lambda: comm.permute(meta(2), [(0, 1)]),
        lambda: comm.permute(meta(2), [(1, 0)]),
        "permute(perm=[(0, 1)]) of [float32[2]]",
        "permute(perm=[(1, 0)]) of [float32[2]]",
    ),
    "template": (
        lambda: comm.start(comm.send, meta(2), 1),
        lambda: comm.start(comm.recv, meta(2, 1), 0),
        "send(dst=1) of [float32[2]]",
        "recv(src=0) of [float32[2, 1]]",
    ),
    "missing": (
        comm.barrier,
        lambda: None,
        "barrier() of [float32[0]]",
        "nothing more",
    ),
    "message missing": (
        lambda: comm.send(meta(2), 1),
        lambda: None,
        "send(dst=1) of [float32[2]]",
        "nothing more",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_names_both_calls(kind: str) -> None:
    """The group, which call it was, and both ranks' calls."""
    one, other, text, other_text = MISMATCHES[kind]

    def program() -> None:
        comm.all_reduce(meta(5))
        one() if rank() == 0 else other()

    with pytest.raises(comm.errors.MismatchError) as caught:
        on_shapes(program, world_size=2)
    number = 0 if "message" in kind or kind == "template" else 1  # a message has an order of its own
    assert str(caught.value) == (
        f"the ranks of group 'world' called different collectives: as number {number}, "
        f"rank 0 called {text}, rank 1 called {other_text}"
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_splits_that_contradict_each_other_are_a_mismatch(device: str) -> None:
    """As in a run with values, where rank 0 sends two rows and rank 1 expects one."""

    def program() -> None:
        for sent in ([1, 1], [1, 1] if rank() else [1, 2]):
            comm.all_to_all(torch.empty(sum(sent), device=device), input_splits=sent, output_splits=[1, 1])

    with pytest.raises(comm.errors.MismatchError) as caught:
        comm.simulate(program, world_size=2, shapes_only=device == "meta")
    assert str(caught.value) == (
        "all_to_all: rank 0 of the group sends 2 rows to rank 1 (input_splits=[1, 2]), which expects 1 (output_splits=[1, 1])"
    )


def test_a_mismatch_within_a_group_names_its_ranks() -> None:
    def program() -> None:
        comm.all_reduce(meta(3 if rank() == 3 else 2), comm.mesh(outer=2, inner=2)["inner"])

    with pytest.raises(
        comm.errors.MismatchError, match=r"group 'inner' .* rank 2 called .*\[float32\[2\]\], rank 3 called .*\[3\]\]"
    ):
        on_shapes(program, world_size=4)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_tensor_with_values_is_refused(shape: tuple[int, ...]) -> None:
    """The call, the rank, and what would do."""
    expected = (
        "all_reduce(op='sum') on rank 0: a tensor is on cpu; with shapes_only=True tensors have no values, "
        "so make them on device='meta'"
    )
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        on_shapes(lambda: comm.all_reduce([meta(3), torch.ones(shape)]), world_size=2)
    assert caught.value.__notes__ == ["raised on rank 0 of 2, on shapes only"]


def test_bad_input_is_refused_as_with_values() -> None:
    with pytest.raises(ValueError, match="dim=0 of a tensor of shape \\[5\\] has size 5; a group of 2 needs a multiple of 2"):
        on_shapes(lambda: comm.reduce_scatter(meta(5)), world_size=2)
    with pytest.raises(ValueError, match="world_size=0: a world has at least one rank"):
        on_shapes(comm.barrier, world_size=0)


SIZES_UNKNOWN: dict[str, Callable[[], Any]] = {
    "uneven": lambda: comm.all_gather(meta(2), uneven=True),
    "splits": lambda: comm.all_to_all(meta(2), input_splits=[1, 1]),
    "object": lambda: comm.broadcast_object(1),
    "objects": lambda: comm.all_gather_object(1),
}


@pytest.mark.parametrize("what", SIZES_UNKNOWN)
def test_what_depends_on_values_says_so(what: str) -> None:
    """Sizes that ranks would tell each other are values, and there are none: an error, no wrong shape."""
    with pytest.raises(ValueError, match="on shapes only it is unknown:"):
        on_shapes(SIZES_UNKNOWN[what], world_size=2)


# -- the surroundings -------------------------------------------------------------------------------------------------


def test_the_ranks_start_alike_and_leave_no_trace() -> None:
    """Each rank's generator starts from the caller's, which is as it was; outside there is a world of one again."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        draws = on_shapes(lambda: torch.rand(1).item(), world_size=3)
        assert draws == [torch.rand(1).item()] * 3
    with pytest.raises(KeyError):
        on_shapes(lambda: {}[0], world_size=2)
    assert (comm.world().rank, comm.world().size) == (0, 1)


def test_inside_of_a_simulation() -> None:
    """Each simulated rank may count a larger world, and is itself again afterwards."""

    def program() -> tuple[int, int]:
        inner = on_shapes(lambda: comm.all_gather(meta(2)).numel(), world_size=7)
        return inner[0], comm.all_reduce(torch.tensor(rank())).item()

    assert comm.simulate(program, world_size=3) == [(14, 3)] * 3
