"""The laws of exchanges and messages: all_to_all (A2A), permute (PM), scatter, gather, send and recv, on simulated ranks."""

from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm, tree
from functional_ds.testing import ADDABLE, COMPLEX, DTYPES, FLOATING, INTEGRAL, Inputs, Leaf, assert_same
from functional_ds.testing import inputs as any_inputs
from tests.comm.maps import SMOOTH, live, pull, values_like

Pairs = list[tuple[int, int]]


def inputs(**how: Any) -> st.SearchStrategy[Inputs]:
    """Worlds and trees, with one leaf of several values in each: an empty tree arrives anywhere."""

    def with_leaf(case: Inputs) -> Inputs:
        shape = (*[2] * case.dim, 2 * case.size)
        return attrs.evolve(case, leaves={"drawn": case.leaves, "surely": Leaf(shape, how.get("dtypes", FLOATING)[0])})

    return any_inputs(**how).map(with_leaf)


def agree(left: Any, right: Any, case: Inputs, *, bits: bool = True) -> None:
    """Both programs give each rank the same."""
    for a, b in zip(case.simulate(left), case.simulate(right), strict=True):
        assert_same(a, b, bits=bits)


def place() -> int:
    return comm.world().rank


# -- all_to_all -------------------------------------------------------------------------------------------------------


def with_dims(case: Inputs, dims: int = 3) -> Inputs:
    """The same with leaves of at least so many dims."""

    def longer(leaf: Leaf) -> Leaf:
        return attrs.evolve(leaf, shape=(*leaf.shape, *[2] * (dims - len(leaf.shape))))

    return attrs.evolve(case, leaves=tree.map(longer, case.leaves))


@pytest.mark.law(5)
@given(inputs(dtypes=DTYPES, cut=True), st.integers(0, 2))
def test_an_all_to_all_is_undone_by_the_one_with_its_dims_swapped(drawn: Inputs, concat: int) -> None:
    """A2A(c,s) ∘ A2A(s,c) = id."""
    case, split = with_dims(drawn), drawn.dim

    def program(x: Any) -> Any:
        there = comm.all_to_all(x, split_dim=split, concat_dim=concat)
        return comm.all_to_all(there, split_dim=concat, concat_dim=split)

    for result, value in zip(case.simulate(program), case.all(), strict=True):
        assert_same(result, value)


@pytest.mark.law(5)
@given(inputs(dtypes=FLOATING, cut=True, max_leaves=2), st.integers(0, 2))
def test_an_all_to_all_moves_a_shard_to_another_dim(drawn: Inputs, other: int) -> None:
    """A2A(s,c) ∘ shard_c = shard_s: sharded along c before, along s after, of the same whole."""
    case, dim = with_dims(drawn), drawn.dim
    n = case.size

    def longer(leaf: Leaf) -> Leaf:
        return attrs.evolve(leaf, shape=tuple(size * n if d == other else size for d, size in enumerate(leaf.shape)))

    whole = attrs.evolve(case, leaves=tree.map(longer, case.leaves)).of(0)  # both dims have a multiple of n

    def shard(dim: int) -> Any:
        return tree.map(lambda leaf: leaf.tensor_split(n, dim)[place()].clone(), whole)

    if dim != other:
        agree(lambda _: comm.all_to_all(shard(other), split_dim=dim, concat_dim=other), lambda _: shard(dim), case)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Inputs, int, list[list[int]], list[Any]]:
    """Inputs, a dim, who sends how many rows to whom, and each rank's tree with that many rows along the dim."""
    case = draw(inputs(dtypes=DTYPES, cut=True, max_leaves=3))
    n, dim = case.size, case.dim
    splits = draw(st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=n, max_size=n))

    def sized(rank: int) -> Any:
        rows = sum(splits[rank])
        leaves = tree.map(lambda leaf: attrs.evolve(leaf, shape=(*leaf.shape[:dim], rows, *leaf.shape[dim + 1 :])), case.leaves)
        return attrs.evolve(case, leaves=leaves).of(rank)

    return case, dim, splits, [sized(rank) for rank in range(n)]


@pytest.mark.law(5)
@given(exchanges(), st.booleans())
def test_an_exchange_of_rows_is_undone_by_the_one_with_its_splits_swapped(drawn: Any, told: bool) -> None:
    """A2A(rᵀ, r) ∘ A2A(r, rᵀ) = id for any matrix r of rows, whether receivers are told their splits or ask for them."""
    case, dim, splits, values = drawn
    dims = {"split_dim": dim, "concat_dim": dim}

    def program(_: Any) -> Any:
        sent, expected = splits[place()], [row[place()] for row in splits]
        there = comm.all_to_all(values[place()], input_splits=sent, output_splits=expected if told else None, **dims)
        for leaf in tree.leaves(there):
            assert leaf.shape[dim] == sum(expected)
        return comm.all_to_all(there, input_splits=expected, output_splits=sent if told else None, **dims)

    for result, value in zip(case.simulate(program), values, strict=True):
        assert_same(result, value)


@pytest.mark.law(5)
@given(inputs(dtypes=DTYPES, cut=True))
def test_equal_splits_are_no_splits(case: Inputs) -> None:
    """A2A with splits of one size is A2A, leaf by leaf."""
    dims = {"split_dim": case.dim, "concat_dim": case.dim}

    def with_splits(leaf: torch.Tensor) -> torch.Tensor:
        return comm.all_to_all(leaf, input_splits=[leaf.shape[case.dim] // case.size] * case.size, **dims)

    agree(lambda x: tree.map(with_splits, x), lambda x: comm.all_to_all(x, **dims), case)


@given(inputs(cut=True, max_leaves=2))
def test_dims_count_from_the_end_too(drawn: Inputs) -> None:
    """C(dim = d - D) = C(dim = d) for tensors of D dims."""
    leaves = [leaf for leaf in tree.leaves(drawn.leaves) if len(leaf.shape) == drawn.dim + 1]
    case, dim = attrs.evolve(drawn, leaves=leaves), drawn.dim
    agree(
        lambda x: [
            comm.all_to_all(x, split_dim=-1, concat_dim=-1),
            comm.gather(x, dim=-1),
            comm.scatter(x, dim=-1),
            comm.scatter_to(x, dim=-1),
            comm.gather_from(x, dim=-1),
            comm.all_gather(x, dim=-1, uneven=True),
        ],
        lambda x: [
            comm.all_to_all(x, split_dim=dim, concat_dim=dim),
            comm.gather(x, dim=dim),
            comm.scatter(x, dim=dim),
            comm.scatter_to(x, dim=dim),
            comm.gather_from(x, dim=dim),
            comm.all_gather(x, dim=dim, uneven=True),
        ],
        case,
    )


@pytest.mark.law(6)
@given(inputs(dtypes=DTYPES, cut=True))
def test_all_gather_is_all_to_all_of_copies(case: Inputs) -> None:
    """AG = A2A ∘ BC-of-own-rows: each rank repeats its own value for each rank."""
    dim, n = case.dim, case.size
    agree(
        lambda x: comm.all_gather(x, dim=dim),
        lambda x: comm.all_to_all(tree.map(lambda leaf: torch.cat([leaf] * n, dim), x), split_dim=dim, concat_dim=dim),
        case,
    )


@pytest.mark.law(6)
@given(exchanges())
def test_an_uneven_all_gather_is_an_exchange_of_copies(drawn: Any) -> None:
    """The same where each rank has another number of rows; the leaves of a tree may differ, too."""
    case, dim, _, values = drawn
    n = case.size

    def rows_of(leaf: torch.Tensor) -> torch.Tensor:
        size = leaf.shape[dim]
        return comm.all_to_all(torch.cat([leaf] * n, dim), split_dim=dim, concat_dim=dim, input_splits=[size] * n)

    def mixed(value: Any) -> Any:
        doubled = tree.map(lambda leaf: torch.cat([leaf, leaf], dim), value)
        return value, doubled

    agree(
        lambda _: comm.all_gather(mixed(values[place()]), dim=dim, uneven=True),
        lambda _: tree.map(rows_of, mixed(values[place()])),
        case,
    )


# -- permute ----------------------------------------------------------------------------------------------------------


@st.composite
def permutations(draw: st.DrawFn, n: int, *, total: bool = False) -> Pairs:
    """Who sends to whom: everybody, or some."""
    ranks = list(range(n))
    sources, targets = draw(st.permutations(ranks)), draw(st.permutations(ranks))
    return list(zip(sources, targets, strict=True))[: None if total else draw(st.integers(0, n))]


@pytest.mark.law(7)
@given(st.data())
def test_permutations_compose(data: st.DataObject) -> None:
    """PM(p) ∘ PM(q) = PM(p ∘ q), for partial ones too: what finds no next place is lost, and zeros arrive for it."""
    case = data.draw(inputs(dtypes=DTYPES))
    p, q = (data.draw(permutations(case.size)) for _ in range(2))
    both = [(src, dst) for src, middle in q for at, dst in p if at == middle]
    assert comm.Permutation(q).then(comm.Permutation(p)) == comm.Permutation(both)
    agree(lambda x: comm.permute(comm.permute(x, q), p), lambda x: comm.permute(x, both), case)


@pytest.mark.law(7)
@given(st.data())
def test_the_inverse_undoes_a_permutation(data: st.DataObject) -> None:
    """PM(p⁻¹) ∘ PM(p) = id for a total p."""
    case = data.draw(inputs(dtypes=DTYPES))
    p = comm.Permutation(data.draw(permutations(case.size, total=True)))
    agree(lambda x: comm.permute(comm.permute(x, p), p.inverse), lambda x: x, case)


@pytest.mark.law(7)
@given(st.data())
def test_a_permutation_takes_each_value_to_its_place(data: st.DataObject) -> None:
    """PM(p)(x)_dst = x_src for each pair of p, and 0 where there is none."""
    case = data.draw(inputs(dtypes=DTYPES))
    p = {dst: src for src, dst in data.draw(permutations(case.size))}
    everyone = case.all()
    results = case.simulate(lambda x: comm.permute(x, [(src, dst) for dst, src in p.items()]))
    for rank, result in enumerate(results):
        assert_same(result, everyone[p[rank]] if rank in p else tree.map(torch.zeros_like, everyone[rank]))


@pytest.mark.law(9)
@given(st.data())
def test_a_permutation_changes_no_sum(data: st.DataObject) -> None:
    """AR ∘ PM = AR for total p, and so for min and max."""
    op = data.draw(st.sampled_from(["sum", "min", "max"]))
    case = data.draw(inputs(dtypes=ADDABLE if op == "sum" else (*FLOATING, *INTEGRAL)))
    p = data.draw(permutations(case.size, total=True))
    agree(lambda x: comm.all_reduce(comm.permute(x, p), op=op), lambda x: comm.all_reduce(x, op=op), case, bits=False)


@pytest.mark.law(9)
@given(st.data())
def test_a_permutation_permutes_what_is_gathered(data: st.DataObject) -> None:
    """(AG ∘ PM(p))(x) has x_src at place dst for each pair of p."""
    case = data.draw(inputs(dtypes=DTYPES))
    p = data.draw(permutations(case.size, total=True))
    order = [src for src, _ in sorted(p, key=lambda pair: pair[1])]
    agree(
        lambda x: comm.all_gather(comm.permute(x, p), tiled=False),
        lambda x: tree.map(lambda leaf: leaf[order], comm.all_gather(x, tiled=False)),
        case,
    )


# -- scatter and gather -----------------------------------------------------------------------------------------------


@pytest.mark.law(3)
@given(inputs(dtypes=ADDABLE, cut=True))
def test_reduce_scatter_is_reduce_then_scatter(case: Inputs) -> None:
    """RS = scatter(r) ∘ reduce(r), for any root r."""
    root, dim = case.seed % case.size, case.dim
    agree(lambda x: comm.reduce_scatter(x, dim=dim), lambda x: comm.scatter(comm.reduce(x, root), root, dim=dim), case)


@pytest.mark.law(4)
@given(inputs(dtypes=DTYPES, cut=True), st.booleans())
def test_all_gather_is_gather_then_broadcast(case: Inputs, tiled: bool) -> None:
    """AG = BC(r) ∘ gather(r), for any root r; elsewhere a gather gives zeros."""
    root = case.seed % case.size
    options = {"dim": case.dim, "tiled": True} if tiled else {"tiled": False}

    def program(x: Any) -> Any:
        at_root = comm.gather(x, root, **options)
        return comm.broadcast(at_root, root), at_root, comm.all_gather(x, **options)

    for rank, (spread, at_root, everywhere) in enumerate(case.simulate(program)):
        assert_same(spread, everywhere)
        assert_same(at_root, everywhere if rank == root else tree.map(torch.zeros_like, everywhere))


@pytest.mark.law(1)
@given(inputs(dtypes=DTYPES, cut=True), st.booleans())
def test_gather_undoes_scatter(case: Inputs, tiled: bool) -> None:
    """gather(r) ∘ scatter(r) = id on rank r, whether the others pass a value or what is to arrive."""
    root = case.seed % case.size
    if not tiled:
        leaves = tree.map(lambda leaf: attrs.evolve(leaf, shape=(case.size, *leaf.shape)), case.leaves)
        case = attrs.evolve(case, leaves=leaves)
    options = {"dim": case.dim, "tiled": True} if tiled else {"tiled": False}

    def program(x: Any) -> Any:
        piece = comm.scatter(x, root, **options)
        with_template = comm.scatter(x if place() == root else None, root, like=piece, **options)
        return comm.gather(piece, root, **options), piece, with_template

    for rank, (back, piece, with_template) in enumerate(case.simulate(program)):
        assert_same(with_template, piece)
        if rank == root:
            assert_same(back, case.of(root))


@pytest.mark.law(16)
@given(inputs(dtypes=SMOOTH, cut=True, max_leaves=2))
def test_gradients_go_back_through_a_template(case: Inputs) -> None:
    """scatterᵀ = gather where the others pass what is to arrive: the root gets all gradients, the templates zeros."""
    root, dim = case.seed % case.size, case.dim

    def program(values: Any) -> Any:
        x = live(values)
        like = live(comm.scatter(values, root, dim=dim))
        piece = comm.scatter(x if place() == root else None, root, dim=dim, like=like)
        y = values_like(case, piece, "y")
        back = pull(piece, x if place() == root else like, y)
        return back, comm.gather(y, root, dim=dim)

    for rank, (back, gathered) in enumerate(case.simulate(program)):
        assert_same(back, gathered if rank == root else tree.map(torch.zeros_like, back))


# -- messages ---------------------------------------------------------------------------------------------------------


def transferred(x: Any, like: Any, src: int, dst: int, tag: int, blocking: bool) -> Any:
    """One message; zeros on the other ranks."""
    if place() == src:
        return comm.send(x, dst, tag=tag) if blocking else comm.start(comm.send, x, dst, tag=tag).wait()
    if place() == dst:
        return comm.recv(like, src, tag=tag) if blocking else comm.start(comm.recv, like, src, tag=tag).wait()
    return tree.map(torch.zeros_like, x)


@st.composite
def messages(draw: st.DrawFn, dtypes: Any = DTYPES) -> tuple[Inputs, tuple[int, int, int, bool]]:
    case = draw(inputs(sizes=st.integers(2, 4), dtypes=dtypes))
    src, dst = draw(st.permutations(range(case.size)))[:2]
    return case, (src, dst, draw(st.integers(0, 2)), draw(st.booleans()))


@pytest.mark.law(7)
@given(messages())
def test_a_message_is_a_permutation_of_one_pair(drawn: Any) -> None:
    """recv(src) ∘ send(dst) = PM([(src, dst)]): the value arrives, and the sender has zeros."""
    case, message = drawn
    agree(lambda x: transferred(x, x, *message), lambda x: comm.permute(x, [message[:2]]), case)


@pytest.mark.law(7)
@given(inputs(sizes=st.integers(2, 5), dtypes=DTYPES), st.booleans())
def test_a_swap_is_a_permutation(case: Inputs, received_first: bool) -> None:
    """batch_p2p([Send, Recv]) of two ranks = PM([(a, b), (b, a)]), in either order of the two."""
    a, b = case.seed % case.size, (case.seed + 1) % case.size

    def swap(x: Any) -> Any:
        if place() not in (a, b):
            return tree.map(torch.zeros_like, x)
        other = a + b - place()
        ops = [comm.Send(x, other), comm.Recv(x, other)]
        return comm.batch_p2p(ops[::-1])[0] if received_first else comm.batch_p2p(ops)[1]

    agree(swap, lambda x: comm.permute(x, [(a, b), (b, a)]), case)


@pytest.mark.law(16)
@given(messages((*FLOATING, *COMPLEX)))
def test_a_messages_gradient_goes_back(drawn: Any) -> None:
    """<C x, y> = <x, Cᵀ y>: the sender gets what the receiver has for a gradient, and the template gets zeros."""
    case, (src, dst, tag, blocking) = drawn

    def program(values: Any) -> Any:
        if place() not in (src, dst):
            return None
        x = live(values)
        y = values_like(case, x, "y")
        return pull(transferred(x, x, src, dst, tag, blocking), x, y), y

    results = case.simulate(program)
    assert_same(results[src][0], results[dst][1])
    assert_same(results[dst][0], tree.map(torch.zeros_like, results[dst][1]))


@pytest.mark.law(17)
@given(messages([torch.float64]))
def test_a_messages_second_derivative(drawn: Any) -> None:
    """L = <w, (recv x)³> + Σ send(x): the sender's gradient is 3 w x², and its Hessian's product with v is 6 w x v. The
    sender's own part of the loss is linear, so its backward pass by itself would stop at a constant."""
    case, (src, dst, tag, blocking) = drawn

    def program(values: Any) -> Any:
        x = live(values)
        if place() not in (src, dst):
            return x, x
        out = transferred(x, x, src, dst, tag, blocking)
        if place() == src:
            y = tree.map(torch.ones_like, out)
            gradient = pull(out, x, y, create_graph=True)
        else:
            w = case.of(dst, name="w")
            loss = sum((a * b**3).sum() for a, b in zip(tree.leaves(w), tree.leaves(out), strict=True))
            gradient = pull([loss], x, [torch.ones_like(loss)], create_graph=True)
        return gradient, pull(gradient, x, case.of(src, name="v"))

    gradient, product = case.simulate(program)[src]
    x, w, v = case.of(src), case.of(dst, name="w"), case.of(src, name="v")
    assert_same(gradient, tree.map(lambda x, w: 3 * w * x**2, x, w), bits=False)
    assert_same(product, tree.map(lambda x, w, v: 6 * w * x * v, x, w, v), bits=False)


@pytest.mark.law(17)
def test_ranks_may_use_a_result_to_different_degrees() -> None:
    """f(x) = out₀ + out₁³ where rank 0's loss is linear: its gradient is a constant there, and both join the second pass."""

    def program(use: Any) -> tuple[float, float]:
        x = torch.tensor([2.0 + place()], requires_grad=True)
        loss = use(x)[0] if place() == 0 else (use(x)[0]) ** 3
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (product,) = torch.autograd.grad(gradient.sum(), x)
        return gradient.item(), product.item()

    # out = x0 + x1 = 5 on both: the gradient is 1 + 3 * 5**2 on both, and so is each row sum of the Hessian: 6 * 5 * (1 + 1)
    assert comm.simulate(partial(program, comm.all_reduce), world_size=2) == [(76.0, 60.0)] * 2
    # out = x0 on both: 1 + 3 * 2**2, and 6 * 2; x1 is not used
    assert comm.simulate(partial(program, comm.broadcast), world_size=2) == [(13.0, 12.0), (0.0, 0.0)]
