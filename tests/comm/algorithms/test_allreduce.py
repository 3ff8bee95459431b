"""Law 39 on simulated ranks: each algorithm is all_reduce, leaves the same bits everywhere, and sends what its formula says."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm, tree
from functional_ds.comm import algorithms
from functional_ds.comm.algorithms import trees
from functional_ds.comm.algorithms.cost import ALGORITHMS, Link, Network, predict, sent
from functional_ds.testing import ADDABLE, COMPLEX, DTYPES, FLOATING, INTEGRAL, Inputs, Leaf, assert_same, inputs, world_sizes

FLAT = Network(Link(1.0, 1.0))
ON_FLAT = [name for name in ALGORITHMS if name != "hierarchical"]


@attrs.frozen
class Run:
    """An algorithm with its options: ``run(x)`` calls it."""

    name: str
    per_node: int = 1
    chunks: int = 1

    def __call__(self, x: Any, op: str = "sum") -> Any:
        function = getattr(algorithms, self.name)
        if self.name == "hierarchical":
            grid = comm.mesh(node=comm.world().size // self.per_node, place=self.per_node)
            return function(x, grid["place"], grid["node"], op=op)
        if "tree" in self.name:
            return function(x, op=op, chunks=self.chunks)
        return function(x, op=op)


def runs(n: int) -> st.SearchStrategy[Run]:
    """Every algorithm; the nodes divide n."""
    chunks = st.builds(Run, st.sampled_from(["tree", "double_tree"]), chunks=st.integers(1, 3))
    nodes = st.builds(Run, st.just("hierarchical"), st.sampled_from([m for m in range(1, n + 1) if n % m == 0]))
    return st.builds(Run, st.sampled_from(["ring", "recursive_doubling", "halving_doubling"])) | chunks | nodes


@st.composite
def drawn(draw: st.DrawFn, dtypes: Any = DTYPES, most: int = 9) -> tuple[Inputs, Run]:
    size = draw(world_sizes(most))
    return draw(inputs(sizes=st.just(size), dtypes=dtypes)), draw(runs(size))


def noise(leaf: Leaf, seed: int) -> Tensor:
    """Normal numbers whose sums round, with a NaN, infinities and both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(leaf.shape, generator=generator, dtype=torch.float64) * 10
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0])
    chosen = special[torch.randint(0, 5, leaf.shape, generator=generator)].double()
    values = torch.where(torch.rand(leaf.shape, generator=generator) < 0.2, chosen, values)
    return (torch.complex(values, values.flip(0)) if leaf.dtype.is_complex else values).to(leaf.dtype)


# -- what they compute ---------------------------------------------------------------------------------------------------


@pytest.mark.law(39)
@given(drawn())
def test_each_is_all_reduce(case: tuple[Inputs, Run]) -> None:
    """ALGORITHM = AR on small integers, of all shapes and dtypes, for every op."""
    values, run = case
    kinds = {leaf.dtype for leaf in tree.leaves(values.leaves)}
    ops = {"sum", "product", "min", "max"}
    if torch.bool in kinds:
        ops -= {"sum", "product"}
    if any(dtype.is_complex for dtype in kinds):
        ops -= {"min", "max"}
    if kinds & {torch.float16, torch.bfloat16}:
        ops -= {"product"}  # it rounds
    for op in ops:
        expected = values.simulate(lambda x, op=op: comm.all_reduce(x, op=op))
        for result, other in zip(values.simulate(lambda x, op=op: run(x, op)), expected, strict=True):
            assert_same(result, other, bits=False)


@pytest.mark.sample(20)
@pytest.mark.law(39)
@pytest.mark.parametrize("n", [*range(1, 10), 16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_is_all_reduce_on_so_many_ranks(name: str, n: int) -> None:
    """No rank, fewer or as many elements as ranks, or more."""
    for numel in (0, 1, n, 3 * n + 1):
        x = torch.arange(numel) + 1
        on_rank = partial(lambda run, x: run(x * (comm.world().rank + 1)), Run(name, per_node=2 if n % 2 == 0 else 1), x)
        for result in comm.simulate(on_rank, world_size=n):
            assert_same(result, x * (n * (n + 1) // 2))


@pytest.mark.law(39)
@given(st.integers(2, 9), st.data())
def test_all_ranks_get_the_same_bits(n: int, data: st.DataObject) -> None:
    """Where sums round, with NaNs and signed zeros, in each floating dtype."""
    run = data.draw(runs(n))
    leaf = Leaf((data.draw(st.integers(1, 20)),), data.draw(st.sampled_from([*FLOATING, *COMPLEX])))
    op = data.draw(st.sampled_from(["sum", "product"] if leaf.dtype.is_complex else ["sum", "product", "min", "max"]))
    seed = data.draw(st.integers(0, 10_000))
    first, *others = comm.simulate(lambda: run(noise(leaf, seed + comm.world().rank), op), world_size=n, seed=seed)
    for other in others:
        assert_same(other, first)


@given(st.integers(2, 9), st.data())
def test_floats_are_all_reduce_within_rounding(n: int, data: st.DataObject) -> None:
    """Each of at most n combinations rounds once, by half a unit in the last place of a partial sum."""
    run, dtype = data.draw(runs(n)), data.draw(st.sampled_from(FLOATING))
    xs = [torch.rand(7, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype) for rank in range(n)]
    exact = torch.stack([x.double() for x in xs]).sum(0)
    for result in comm.simulate(lambda: run(xs[comm.world().rank]), world_size=n):
        assert ((result.double() - exact).abs() <= n * torch.finfo(dtype).eps * exact).all()


@given(drawn(dtypes=FLOATING))
def test_an_average_is_the_sum_divided(case: tuple[Inputs, Run]) -> None:
    values, run = case
    expected = values.simulate(lambda x: comm.all_reduce(x, op="avg"))
    for result, other in zip(values.simulate(lambda x: run(x, "avg")), expected, strict=True):
        assert_same(result, other)


@pytest.mark.law(11)
@given(drawn(dtypes=ADDABLE))
def test_none_touches_its_input(case: tuple[Inputs, Run]) -> None:
    """Nor do results share memory with it, or with one another."""
    values, run = case

    def program(x: Any) -> None:
        before = tree.map(torch.clone, x)
        result = run(x)
        assert_same(x, before)
        places = [leaf.untyped_storage().data_ptr() for leaf in tree.leaves((result, x)) if leaf.numel()]
        assert len(set(places)) == len(places)

    values.simulate(program)


# -- gradients -----------------------------------------------------------------------------------------------------------


def derivatives(function: Callable[[Any], Any], x: Any) -> Any:
    """Output, gradient and the gradient of the gradient, for cotangents that differ between ranks."""
    x = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(leaf.dtype.is_floating_point), x)
    out = function(x)
    ends, starts = ([leaf for leaf in tree.leaves(t) if leaf.requires_grad] for t in (out, x))
    weights = [(leaf.detach() + comm.world().rank).requires_grad_() for leaf in ends]
    back = torch.autograd.grad(ends, starts, weights, create_graph=True) if starts else ()
    again = torch.autograd.grad(back, weights, [leaf.detach() * 2 + 1 for leaf in back]) if starts else ()
    return tree.map(torch.detach, (out, list(back), list(again)))


@pytest.mark.law(16)
@given(drawn(dtypes=[torch.float64, torch.float32, torch.int64], most=6))
def test_gradients_are_those_of_all_reduce(case: tuple[Inputs, Run]) -> None:
    """The transpose of a sum is the sum, and its transpose again; integer leaves have none."""
    values, run = case
    expected = values.simulate(partial(derivatives, comm.all_reduce))
    for result, other in zip(values.simulate(partial(derivatives, run)), expected, strict=True):
        assert_same(result, other)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_maximum_has_no_gradient(name: str) -> None:
    def program() -> None:
        x = torch.ones(3, requires_grad=True)
        Run(name)(x, "max").sum().backward()

    with pytest.raises(ValueError, match=rf"{name}\(op='max'\) has no transpose"):
        comm.simulate(program, world_size=2)


# -- what they send ------------------------------------------------------------------------------------------------------


def counted(run: Run, numel: int, n: int, dtype: torch.dtype = torch.int32) -> list[comm.Ledger]:
    """Each rank's ledger."""

    def program() -> comm.Ledger:
        with comm.ledger(times=True) as book:
            run(torch.ones(numel, dtype=dtype))
        return book

    return comm.simulate(program, world_size=n)


@pytest.mark.law(39)
@given(world_sizes(9), st.integers(1, 40), st.sampled_from(INTEGRAL), st.data())
def test_executed_messages_and_bytes_are_the_formulas(n: int, numel: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """On each rank; a message is a call in which the rank sends."""
    run = data.draw(runs(n))
    for rank, book in enumerate(counted(run, numel, n, dtype)):
        formula = sent(run.name, numel, n, rank, ranks_per_node=run.per_node, chunks=run.chunks)
        assert sum(event.bytes > 0 for event in book.events) == formula.messages
        assert sum(row.elements for row in book.rows) == formula.elements
        assert book.bytes == formula.elements * dtype.itemsize


@pytest.mark.law(39)
@pytest.mark.parametrize("n", [33, 64])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_many_ranks_send_what_the_formulas_say(name: str, n: int) -> None:
    """Without values, so that there can be many."""
    run = Run(name, per_node=n // 11 if n % 11 == 0 else 8)

    def program() -> int:
        with comm.ledger() as book:
            run(torch.empty(3 * n, device="meta"))
        return sum(row.elements for row in book.rows)

    formula = [sent(name, 3 * n, n, rank, ranks_per_node=run.per_node).elements for rank in range(n)]
    assert comm.simulate(program, world_size=n, shapes_only=True) == formula


@pytest.mark.law(39)
@given(world_sizes(9), st.integers(1, 4), st.sampled_from(["ring", "recursive_doubling", "halving_doubling"]))
def test_executed_rounds_are_the_formulas(n: int, k: int, name: str) -> None:
    """Each permute is a round: α and, for the bytes of its message, β."""
    numel = n * k << n.bit_length()  # divided by n, and by the power of two below
    cost = predict(name, numel * 4, n, FLAT)
    for book in counted(Run(name), numel, n):
        assert sum(row.calls for row in book.rows) == cost.messages
        assert sum(row.payload for row in book.rows) == cost.bytes


def longest_chain(logs: list[list[tuple[str, int, int]]]) -> int:
    """Messages of which each is sent after the one before has been received; a log has ("send" or "recv", peer, tag)."""
    clocks, under_way = [0] * len(logs), defaultdict(deque)
    left = [deque(log) for log in logs]
    while any(left):
        stuck = True
        for rank, log in enumerate(left):
            while log and (log[0][0] == "send" or under_way[log[0][1], rank, log[0][2]]):
                kind, peer, tag = log.popleft()
                stuck = False
                if kind == "send":
                    under_way[rank, peer, tag].append(clocks[rank] + 1)
                else:
                    clocks[rank] = max(clocks[rank], under_way[peer, rank, tag].popleft())
        assert not stuck
    return max(clocks)


@pytest.mark.law(39)
@pytest.mark.parametrize("name", ["tree", "double_tree"])
def test_no_branch_is_longer_than_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 ⌈log2 n⌉ messages pass one after another, in both trees at the same time."""
    real = comm.batch_p2p
    logs: dict[int, list[tuple[str, int, int]]] = {}

    @comm.table.collective
    def logging(ops: Any, group: comm.Group) -> comm.table.Request[Any]:
        log = logs.setdefault(group.rank, [])
        log += [("send", op.dst, op.tag) for op in ops if isinstance(op, comm.Send)]

        def received(results: Any) -> Any:
            log.extend(("recv", op.src, op.tag) for op in ops if isinstance(op, comm.Recv))
            return results

        return comm.table.prepare(real, ops, group).then(received)

    monkeypatch.setattr(trees, "batch_p2p", logging)
    for n in (*range(2, 24), 64):
        logs.clear()
        comm.simulate(lambda: Run(name)(torch.ones(2, device="meta")), world_size=n, shapes_only=True)
        assert longest_chain([logs[rank] for rank in range(n)]) == predict(name, 8, n, FLAT).messages


@pytest.mark.parametrize("name", ON_FLAT)
def test_a_tree_costs_one_run_for_each_dtype(name: str) -> None:
    """Law 12: two leaves of one dtype go together."""
    values = {"a": torch.ones(3), "b": [torch.ones(5), torch.ones(2, dtype=torch.int64)]}

    def program() -> tuple[int, int]:
        with comm.ledger() as one:
            Run(name)(torch.ones(8))
        with comm.ledger() as book:
            Run(name)(values)
        return one.calls, book.calls

    assert all(calls == 2 * one for one, calls in comm.simulate(program, world_size=4))


# -- where they run, and what is refused ----------------------------------------------------------------------------------


def test_a_group_is_its_ranks_alone() -> None:
    def program() -> list[int]:
        column = comm.mesh(rows=2, columns=3)["columns"]
        x = torch.tensor(comm.world().rank)
        return [getattr(algorithms, name)(x, column).item() for name in ON_FLAT]

    assert comm.simulate(program, world_size=6) == [[3] * 5] * 3 + [[12] * 5] * 3


def on_processes() -> list[Any]:
    x = torch.arange(5) * (comm.world().rank + 1)
    return [Run(name)(x).tolist() for name in ALGORITHMS]


def test_processes_compute_what_simulated_ranks_do() -> None:
    assert comm.spawn(on_processes, world_size=3) == comm.simulate(on_processes, world_size=3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: algorithms.ring(x, op="median"), ValueError, "op='median' is unknown; use one of"),
        (lambda x: algorithms.tree(x > 0), ValueError, "op='sum' of a bool tensor"),
        (lambda x: algorithms.double_tree(x.to(torch.complex64), op="max"), ValueError, "complex numbers have no order"),
        (lambda x: algorithms.recursive_doubling(x.long(), op="avg"), ValueError, "op='avg' of an integer or bool tensor"),
        (lambda x: algorithms.halving_doubling({"a": 1}), TypeError, "halving_doubling: every leaf must be a tensor"),
        (lambda x: algorithms.tree(x, chunks=0), ValueError, "chunks=0: a value is split into at least one chunk"),
        (lambda x: algorithms.hierarchical(x, comm.world(), comm.world()), ValueError, r"(?s)inner=.*outer=.*take two axes"),
    ],
)
def test_bad_input_is_refused(call: Callable[[Tensor], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        comm.simulate(lambda: call(torch.ones(2)), world_size=2)
