"""What the functions refuse, and what they do in a world of one."""

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

Message = str | dict[int, str]  # the same on both ranks (who is named), or each rank's own

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], Message]] = {
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
    "sum of float8": (
        lambda: comm.all_reduce(ONES.to(torch.float8_e4m3fn)),
        ValueError,
        "op='sum' of a tensor of torch.float8_e4m3fn, which torch has no sum for: cast it to float32 or bfloat16 first",
    ),
    "avg of float8": (
        lambda: comm.reduce_scatter(ONES.to(torch.float8_e5m2), op="avg"),
        ValueError,
        "of a tensor of torch.float8_e5m2, which torch has no sum for",
    ),
    "max of uint32": (
        lambda: comm.reduce(ONES.to(torch.uint32), op="max"),
        ValueError,
        "op='max' of a tensor of torch.uint32, which torch has no max for: cast it to int32 or int64 first",
    ),
    "avg of integers": (
        lambda: comm.all_reduce({"a": ONES, "b": ONES.int()}, op="avg"),
        ValueError,
        "op='avg' of an integer or bool tensor (torch.int32): use sum, or cast it first",
    ),
    "avg of bool": (lambda: comm.reduce(ONES > 0, op="avg"), ValueError, "op='avg' of an integer or bool tensor (torch.bool)"),
    "avg of integers under way": (
        lambda: comm.start(comm.reduce_scatter, ONES.long(), op="avg"),
        ValueError,
        "op='avg' of an integer or bool tensor (torch.int64): use sum, or cast it first",
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
        "a scalar has no dim to split or concatenate along; use tiled=False to stack on a new axis",
    ),
    "gathering scalars from the end": (lambda: comm.all_gather(SCALAR, dim=-1), ValueError, "a scalar has no dim to split"),
    "scattering a scalar": (
        lambda: comm.reduce_scatter(SCALAR),
        ValueError,
        "a scalar cannot be split into pieces; it needs a dim to split along",
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
    "src too large": (lambda: comm.broadcast(ONES, 2), ValueError, "src=2 is not a rank of the group; its ranks are 0..1"),
    "src negative": (lambda: comm.broadcast(ONES, -1), ValueError, "src=-1 is not a rank of the group; its ranks are 0..1"),
    "src no integer": (lambda: comm.broadcast(ONES, 0.0), ValueError, "src=0.0 is not a rank of the group"),
    "dst too large": (lambda: comm.reduce(ONES, 2), ValueError, "dst=2 is not a rank of the group; its ranks are 0..1"),
    "dst of gather": (lambda: comm.gather(ONES, 2), ValueError, "dst=2 is not a rank of the group; its ranks are 0..1"),
    "src of scatter": (lambda: comm.scatter(ONES, -1), ValueError, "src=-1 is not a rank of the group; its ranks are 0..1"),
    "src of scatter, with a template": (
        lambda: comm.scatter(None, 2, like=ONES),
        ValueError,
        "src=2 is not a rank of the group; its ranks are 0..1",
    ),
    "src of an object": (lambda: comm.broadcast_object(1, 2), ValueError, "src=2 is not a rank of the group"),
    "src a truth value": (lambda: comm.broadcast(ONES, True), ValueError, "src=True is not a rank of the group"),
    "gather of scalars": (lambda: comm.gather(SCALAR), ValueError, "a scalar has no dim to split or concatenate along"),
    "dim of gather": (lambda: comm.gather(ONES, dim=1), ValueError, "dim=1 is out of range for a tensor of shape [4]"),
    "scatter of a scalar": (lambda: comm.scatter(SCALAR), ValueError, "a scalar cannot be split into pieces"),
    "scatter does not divide": (
        lambda: comm.scatter(torch.ones(2, 3), dim=1),
        ValueError,
        "scatter(src=0, dim=1, tiled=True) on rank {rank} of 'world': dim=1 of a tensor of shape [2, 3] has size 3; "
        "a group of 2 needs a multiple of 2; pad the tensor or use another dim",
    ),
    "scatter of too many rows": (lambda: comm.scatter(ONES, tiled=False), ValueError, "needs exactly 2 (tiled=False)"),
    "dim of a template": (
        lambda: comm.scatter(ONES if comm.world().rank == 0 else None, like=torch.ones(2), dim=3),
        ValueError,
        {0: "dim=3 is out of range for a tensor of shape [4]", 1: "dim=3 is out of range for a tensor of shape [2]"},
    ),
    "dim of a template from the end": (
        lambda: comm.scatter(None, 1 - comm.world().rank, like=torch.ones(2), dim=-2),
        ValueError,
        "scatter: dim=-2 is out of range for a tensor of shape [2]",
    ),
    "nothing to scatter": (
        lambda: comm.scatter(None, 1),
        ValueError,
        {
            0: "scatter: x is None on rank 0; pass like=, a tree shaped as what arrives",
            1: "scatter: x is None on rank 1; rank 1 is src and gives the whole",
        },
    ),
    "all_to_all does not divide": (
        lambda: comm.all_to_all(torch.ones(2, 3), split_dim=1),
        ValueError,
        "split_dim=1 of a tensor of shape [2, 3] has size 3; a group of 2 needs a multiple of 2",
    ),
    "split_dim": (
        lambda: comm.all_to_all(ONES, split_dim=1),
        ValueError,
        "split_dim=1 is out of range for a tensor of shape [4]",
    ),
    "concat_dim": (
        lambda: comm.all_to_all(ONES, concat_dim=2),
        ValueError,
        "concat_dim=2 is out of range for a tensor of shape",
    ),
    "all_to_all of a scalar": (lambda: comm.all_to_all(SCALAR), ValueError, "a scalar cannot be split into pieces"),
    "splits along two dims": (
        lambda: comm.all_to_all(torch.ones(2, 2), split_dim=1, input_splits=[1, 1]),
        ValueError,
        "split_dim=1 and concat_dim=0: with input_splits they must be the same",
    ),
    "too few splits": (
        lambda: comm.all_to_all(ONES, input_splits=[4]),
        ValueError,
        "input_splits=[4]: a group of 2 needs 2 sizes, one for each rank",
    ),
    "too many output splits": (
        lambda: comm.all_to_all(ONES, input_splits=[2, 2], output_splits=[2, 1, 1]),
        ValueError,
        "output_splits=[2, 1, 1]: a group of 2 needs 2 sizes >= 0, one for each rank",
    ),
    "negative splits": (
        lambda: comm.all_to_all(ONES, input_splits=[5, -1], output_splits=[2, 2]),
        ValueError,
        "input_splits=[5, -1]: a group of 2 needs 2 sizes >= 0, one for each rank",
    ),
    "splits that do not add up": (
        lambda: comm.all_to_all(ONES, input_splits=[1, 2], output_splits=[1, 2]),
        ValueError,
        "input_splits=[1, 2] add up to 3, and dim=0 of a tensor of shape [4] has size 4",
    ),
    "output splits alone": (
        lambda: comm.all_to_all(ONES, output_splits=[2, 2]),
        ValueError,
        "output_splits=[2, 2] without input_splits: pass both",
    ),
    "a destination twice": (
        lambda: comm.permute(ONES, [(0, 1), (1, 1)]),
        ValueError,
        "perm names rank 1 twice as a destination: [(0, 1), (1, 1)]; a rank has at most one of each",
    ),
    "a source twice": (
        lambda: comm.permute(ONES, [(0, 1), (0, 0)]),
        ValueError,
        "perm names rank 0 twice as a source: [(0, 0), (0, 1)]; a rank has at most one of each",
    ),
    "no pairs to permute": (
        lambda: comm.permute(ONES, [1, 0]),
        TypeError,
        "perm=[1, 0]: pairs (source, destination) of ranks are needed, as [(0, 1), (1, 0)]",
    ),
    "triples to permute": (lambda: comm.permute(ONES, [(0, 1, 1)]), TypeError, "perm=[(0, 1, 1)]: pairs (source, destination)"),
    "a negative rank to permute": (
        lambda: comm.permute(ONES, [(0, -1)]),
        ValueError,
        "perm=[(0, -1)] names a negative rank; ranks count from 0",
    ),
    "a rank too large to permute": (
        lambda: comm.permute(ONES, [(0, 1), (1, 2)]),
        ValueError,
        "perm=[(0, 1), (1, 2)] names rank 2; the group's ranks are 0..1",
    ),
    "uneven and untiled": (
        lambda: comm.all_gather(ONES, uneven=True, tiled=False),
        ValueError,
        "uneven=True with tiled=False: pieces of different sizes do not stack; gather them along a dim",
    ),
    "uneven scalars": (
        lambda: comm.all_gather(SCALAR, uneven=True),
        ValueError,
        "dim=0 is out of range for a tensor of shape []",
    ),
    "dim of uneven": (
        lambda: comm.all_gather(ONES, dim=1, uneven=True),
        ValueError,
        "dim=1 is out of range for a tensor of shape",
    ),
    "scatter_to does not divide": (
        lambda: comm.scatter_to(torch.ones(3)),
        ValueError,
        "dim=0 of a tensor of shape [3] has size 3; a group of 2 needs a multiple of 2",
    ),
    "gather_from scalars": (lambda: comm.gather_from(SCALAR), ValueError, "a scalar has no dim to split or concatenate along"),
    "reduce_from of bools": (lambda: comm.reduce_from(ONES > 0), ValueError, "op='sum' of a bool tensor"),
    "copy_to of a number": (lambda: comm.copy_to(1.0), TypeError, "copy_to: every leaf must be a tensor"),
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
    "a name as a group": (lambda: comm.all_reduce(ONES, "dp"), TypeError, "group='dp' is not a group: pass mesh['dp']"),
    "a dim that is text": (
        lambda: comm.all_gather(ONES, dim="rows"),
        TypeError,
        "all_gather: dim='rows' is str; a dim is an int",
    ),
    "a list as op": (lambda: comm.all_reduce(ONES, op=["sum"]), ValueError, "op=['sum'] is unknown; use one of avg, max"),
    "halves of rows": (
        lambda: comm.all_to_all(torch.ones(2), input_splits=[0.5, 1.5]),
        TypeError,
        "input_splits=[0.5, 1.5]: one whole number of rows for each rank",
    ),
    "ranks as text": (lambda: comm.new_group("01"), TypeError, "ranks='01': pass ranks of the world, like [0, 2]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_with_what_would_do(what: str) -> None:
    """The error names the argument, its value and the sizes concerned, before anything is sent, on each rank alike."""
    call, error, message = REFUSED[what]

    def program() -> str:
        with comm.ledger() as book, pytest.raises(error) as caught:
            call()
        assert not book.rows
        return str(caught.value)

    for rank, text in enumerate(comm.simulate(program, world_size=2)):
        expected = message[rank] if isinstance(message, dict) else message.replace("{rank}", str(rank))
        assert expected in text


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce(op='max')": lambda: comm.all_reduce(torch.ones(2, dtype=torch.complex64), op="max"),
    "reduce(dst=7, op='sum')": lambda: comm.reduce(ONES, 7),
    "all_gather(dim=1, tiled=True)": lambda: comm.all_gather(ONES, dim=1),
    "all_to_all(split_dim=1, concat_dim=0)": lambda: comm.all_to_all(ONES, split_dim=1),
    "permute(perm=[(0, 5)])": lambda: comm.permute(ONES, [(0, 5)]),
    "scatter_to(dim=3)": lambda: comm.scatter_to(ONES, dim=3),
    "all_to_all(split_dim=0, concat_dim=0, input_splits=(1, 1), output_splits=(1, 1))": lambda: comm.all_to_all(
        ONES, input_splits=[1, 1], output_splits=[1, 1]
    ),
}


@pytest.mark.parametrize("shown", CALLS)
def test_an_error_begins_with_the_call_and_the_rank(shown: str) -> None:
    """In a group, the rank is the place there, and the group is named."""

    def program() -> str:
        with pytest.raises(ValueError, match=" on rank ") as caught:
            CALLS[shown]()
        return str(caught.value)

    for rank, text in enumerate(comm.simulate(program, world_size=2)):
        assert text.startswith(f"{shown} on rank {rank} of 'world': ")


@given(inputs(sizes=st.integers(1, 4), dtypes=(*FLOATING, *COMPLEX), cut=True))
def test_an_average_may_be_under_way(case: Inputs) -> None:
    """a started avg gives, at the wait, the bits of the call that waits at once; and a then of it."""

    def program(x: Any) -> list[Any]:
        requests = [
            comm.table.prepare(comm.all_reduce, x, op="avg"),
            comm.table.prepare(comm.reduce_scatter, x, dim=case.dim, op="avg"),
            comm.table.prepare(comm.reduce, x, case.size - 1, op="avg"),
        ]
        pendings = [request.start() for request in requests]
        return [(pending.wait(), request.run()) for pending, request in zip(pendings, requests, strict=True)]

    for results in case.simulate(program):
        for waited, at_once in results:
            assert_same(waited, at_once)


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
            comm.gather(x, dim=case.dim),
            comm.scatter(x, dim=case.dim),
            comm.scatter(comm.gather(x, tiled=False), tiled=False),
            comm.all_to_all(x, split_dim=case.dim, concat_dim=case.dim),
            comm.permute(x, [(0, 0)]),
            comm.copy_to(x),
            comm.scatter_to(x, dim=case.dim),
            comm.gather_from(x, dim=case.dim),
            comm.all_gather(x, dim=case.dim, uneven=True),
            comm.start(comm.all_reduce, x, op="max").wait(),
        ]

    for results in (program(x), *case.simulate(program)):
        for result in results:
            assert_same(result, x)


@given(inputs(sizes=st.just(1), dtypes=(*FLOATING, *COMPLEX)))
def test_alone_sums_and_means_keep_the_value(case: Inputs) -> None:
    """Σ, Π and the mean of one value are that value."""
    x = case.of(0)
    sums = comm.all_reduce(x), comm.reduce(x, op="product"), comm.all_reduce(x, op="avg"), comm.reduce_from(x)
    for result in sums:
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


# -- objects ----------------------------------------------------------------------------------------------------------


def test_objects_come_to_all_as_copies() -> None:
    """all_gather_object(v)[r] = v_r and broadcast_object(v, src) = v_src: equal, and nobody's own; of any size, None too."""

    def program() -> Any:
        rank, size = comm.world().rank, comm.world().size
        mine = {"rank": rank, "long": list(range(1000 * rank)), "none": None}
        everyone = comm.all_gather_object(mine)
        sent = comm.broadcast_object(mine if rank == size - 1 else object(), src=size - 1)
        assert everyone[rank] is not mine
        assert sent is not mine
        pair = comm.new_group([0, size - 1] if size > 1 else [0], "pair")
        within = comm.all_gather_object(rank, pair) if pair.rank >= 0 else None
        return [value["rank"] for value in everyone], [len(value["long"]) for value in everyone], sent["rank"], within

    for size in (1, 3):
        pair = [0, size - 1] if size > 1 else [0]
        assert comm.simulate(program, world_size=size) == [
            (list(range(size)), [1000 * r for r in range(size)], size - 1, pair if r in pair else None) for r in range(size)
        ]
