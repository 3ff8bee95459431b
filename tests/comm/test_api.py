"""What the functions refuse, and what they do in a world of one."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm, tree
from functional_ds.testing import COMPLEX, DTYPES, FLOATING, Inputs, assert_same, inputs

ONES = torch.ones(4)
SCALAR = torch.tensor(1.0)
NO_OP = "use one of avg, max, min, product, sum"

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "unknown op": (lambda: comm.all_reduce(ONES, op="mean"), ValueError, f"op='mean' is unknown; {NO_OP}"),
    "unknown op of reduce": (lambda: comm.reduce(ONES, op="any"), ValueError, f"op='any' is unknown; {NO_OP}"),
    "unknown op of reduce_scatter": (
        lambda: comm.reduce_scatter(ONES, op="add"),
        ValueError,
        f"op='add' is unknown; {NO_OP}",
    ),
    "max of complex": (
        lambda: comm.all_reduce(torch.ones(2, dtype=torch.complex64), op="max"),
        ValueError,
        "op='max' of a complex tensor (torch.complex64): complex numbers have no order; use sum or product",
    ),
    "min of complex": (
        lambda: comm.reduce(torch.ones(2, dtype=torch.complex128), op="min"),
        ValueError,
        "op='min' of a complex tensor (torch.complex128)",
    ),
    "sum of bool": (
        lambda: comm.all_reduce([ONES, ONES > 0]),
        ValueError,
        "op='sum' of a bool tensor: use max for 'any' and min for 'all', or cast it first",
    ),
    "product of bool": (
        lambda: comm.reduce_scatter(ONES > 0, op="product"),
        ValueError,
        "op='product' of a bool tensor",
    ),
    "avg of integers": (
        lambda: comm.all_reduce({"a": ONES, "b": ONES.int()}, op="avg"),
        ValueError,
        "op='avg' of an integer or bool tensor (torch.int32): use sum, or cast it first",
    ),
    "avg of bool": (lambda: comm.reduce(ONES > 0, op="avg"), ValueError, "op='avg' of an integer or bool tensor (torch.bool)"),
    "avg under way": (
        lambda: comm.all_reduce(ONES, op="avg", async_op=True),
        ValueError,
        "op='avg' with async_op=True: ask for the sum and divide by the group's size after the wait",
    ),
    "dim too large": (
        lambda: comm.all_gather(ONES, dim=1),
        ValueError,
        "dim=1 is out of range for a tensor of shape [4]",
    ),
    "dim too small": (
        lambda: comm.all_gather(torch.ones(2, 3), dim=-3),
        ValueError,
        "dim=-3 is out of range for a tensor of shape [2, 3]",
    ),
    "dim of reduce_scatter": (
        lambda: comm.reduce_scatter(torch.ones(2, 2), dim=2),
        ValueError,
        "dim=2 is out of range for a tensor of shape [2, 2]",
    ),
    "dim from the end of several": (
        lambda: comm.all_gather([torch.ones(2, 3), ONES], dim=-1),
        ValueError,
        "dim=-1 counts from the end, but the leaves have [1, 2] dims; use a dim >= 0",
    ),
    "gathering scalars": (
        lambda: comm.all_gather(SCALAR),
        ValueError,
        "a scalar has no dim to cut or concatenate along; use tiled=False to stack on a new axis",
    ),
    "gathering scalars from the end": (lambda: comm.all_gather(SCALAR, dim=-1), ValueError, "a scalar has no dim to cut"),
    "scattering a scalar": (
        lambda: comm.reduce_scatter(SCALAR),
        ValueError,
        "a scalar cannot be scattered; reduce_scatter needs a dim to cut",
    ),
    "scattering a scalar untiled": (lambda: comm.reduce_scatter(SCALAR, tiled=False), ValueError, "a scalar cannot be"),
    "a dim untiled": (
        lambda: comm.all_gather(torch.ones(2, 2), dim=1, tiled=False),
        ValueError,
        "dim=1 with tiled=False: the ranks' values stack on a new leading axis, so dim must be 0",
    ),
    "a dim untiled of reduce_scatter": (
        lambda: comm.reduce_scatter(torch.ones(2, 2), dim=1, tiled=False),
        ValueError,
        "dim=1 with tiled=False",
    ),
    "not divisible": (
        lambda: comm.reduce_scatter(torch.ones(3, 5), dim=1),
        ValueError,
        "dim=1 of a tensor of shape [3, 5] has size 5; a group of 2 needs a multiple of 2; pad the tensor or use another dim",
    ),
    "not a row each": (
        lambda: comm.reduce_scatter(torch.ones(4, 5), tiled=False),
        ValueError,
        "dim=0 of a tensor of shape [4, 5] has size 4; a group of 2 needs exactly 2 (tiled=False)",
    ),
    "src too large": (lambda: comm.broadcast(ONES, 2), ValueError, "src=2 is no rank of the group; its ranks are 0..1"),
    "src negative": (lambda: comm.broadcast(ONES, -1), ValueError, "src=-1 is no rank of the group; its ranks are 0..1"),
    "src no integer": (lambda: comm.broadcast(ONES, 0.0), ValueError, "src=0.0 is no rank of the group"),
    "dst too large": (lambda: comm.reduce(ONES, 2), ValueError, "dst=2 is no rank of the group; its ranks are 0..1"),
    "a number": (
        lambda: comm.all_reduce(1.0),
        TypeError,
        "all_reduce: every leaf must be a tensor; the value itself is float 1.0",
    ),
    "a number in a tree": (
        lambda: comm.broadcast({"a": [ONES, 3]}),
        TypeError,
        "broadcast: every leaf must be a tensor; ['a'][1] is int 3",
    ),
    "a number, and a dim from the end": (
        lambda: comm.reduce_scatter([ONES, "x"], dim=-1),
        TypeError,
        "reduce_scatter: every leaf must be a tensor; [1] is str 'x'",
    ),
    "a number to average": (lambda: comm.reduce([2], op="avg"), TypeError, "reduce: every leaf must be a tensor; [0] is int 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_with_what_would_do(what: str) -> None:
    """The error names the argument, its value and the sizes concerned, before anything is sent."""
    call, error, message = REFUSED[what]

    def program() -> None:
        with comm.ledger() as book:
            try:
                call()
            finally:
                assert not book.rows

    with pytest.raises(error, match=re.escape(message)):
        comm.simulate(program, world_size=2)


@given(inputs(sizes=st.just(1), dtypes=[dtype for dtype in DTYPES if not dtype.is_complex], cut=True))
def test_alone_a_collective_keeps_the_value(case: Inputs) -> None:
    """In a world of one every collective is the identity, up to a leading axis of one; so is a simulated world of one."""
    x = case.of(0)

    def program(x: Any) -> list[Any]:
        return [
            comm.all_reduce(x, op="max"),
            comm.reduce(x, op="min"),
            comm.broadcast(x),
            comm.all_gather(x, dim=case.dim),
            comm.reduce_scatter(x, dim=case.dim, op="max"),
            comm.reduce_scatter(comm.all_gather(x, tiled=False), tiled=False, op="min"),
            comm.all_reduce(x, op="max", async_op=True).wait(),
        ]

    for results in (program(x), *case.simulate(program)):
        for result in results:
            assert_same(result, x)


@given(inputs(sizes=st.just(1), dtypes=(*FLOATING, *COMPLEX)))
def test_alone_sums_and_means_keep_the_value(case: Inputs) -> None:
    """Σ, Π and the mean of one value are that value."""
    x = case.of(0)
    for result in (comm.all_reduce(x), comm.reduce(x, op="product"), comm.all_reduce(x, op="avg")):
        assert_same(result, x)
    assert comm.barrier() is None


def test_trees_keep_their_structure() -> None:
    """Tuples, dicts and records come back as they are; None is no leaf; an empty tree is fine."""

    @tree.record
    class Pair:
        left: torch.Tensor
        right: Any
        name: str = tree.static(default="pair")

    def program() -> Any:
        x = Pair(torch.ones(1), {"a": (torch.ones(2), None), "b": []}, "mine")
        return comm.all_reduce(x), comm.all_gather(()), comm.all_gather([], dim=-1)

    for pair, empty, empties in comm.simulate(program, world_size=2):
        assert (pair.left.item(), pair.right["a"][1], pair.right["b"], pair.name) == (2.0, None, [], "mine")
        assert (empty, empties) == ((), [])
