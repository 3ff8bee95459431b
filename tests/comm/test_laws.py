"""The laws of all_reduce (AR), all_gather (AG), reduce_scatter (RS), broadcast (BC) and reduce (RD), and those that every row
of the table keeps, on simulated ranks.

Those of exchanges and messages are in test_laws_exchange.py; law 18, which compares worlds, in test_worlds_agree.py.
"""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm, tree
from functional_ds.testing import ADDABLE, DTYPES, FLOATING, INTEGRAL, Inputs, Leaf, assert_same, inputs
from tests.comm.maps import SMOOTH, Do, dense, dot, linear, live, pull, rows, transpose, values_like

REAL = (*FLOATING, *INTEGRAL)


def simulate(case: Inputs, program: Callable[..., Any], *names: str) -> list[Any]:
    """``program`` on each rank, with a tree of values for each name."""

    def on_rank() -> Any:
        return program(*(case.of(comm.world().rank, name=name) for name in names))

    return comm.simulate(on_rank, world_size=case.size, seed=case.seed)


def own(x: Any, dim: int = 0) -> Any:
    """This rank's slice of each leaf."""
    here = comm.world()
    return tree.map(lambda leaf: leaf.tensor_split(here.size, dim)[here.rank].clone(), x)


def agree(left: Callable[[Any], Any], right: Callable[[Any], Any], case: Inputs, *, bits: bool = True) -> None:
    """Both programs give each rank the same."""
    for a, b in zip(case.simulate(left), case.simulate(right), strict=True):
        assert_same(a, b, bits=bits)


def ops_of(dtype: torch.dtype) -> st.SearchStrategy[str]:
    """The reductions that the dtype has."""
    if dtype == torch.bool:
        return st.sampled_from(["min", "max"])
    return st.sampled_from(["sum", "product"] if dtype.is_complex else ["sum", "product", "min", "max"])


@st.composite
def reductions(draw: st.DrawFn, *, cut: bool = False) -> tuple[Inputs, str]:
    """Inputs of one dtype, and an op that it has."""
    dtype = draw(st.sampled_from(DTYPES))
    return draw(inputs(dtypes=[dtype], cut=cut)), draw(ops_of(dtype))


# -- what they compute ------------------------------------------------------------------------------------------------


def test_every_row_of_the_table_is_among_the_maps() -> None:
    """The laws below hold for each row, so each row must be there."""
    case = Inputs(2, [Leaf((2,))], seed=0)
    assert {do.name for _, do in rows(case, "sum")} == {row.name for row in comm.table.TABLE} - {"barrier"} | {"uneven"}


@pytest.mark.law(2)
@given(inputs(dtypes=ADDABLE, cut=True, max_leaves=2))
def test_each_row_is_what_torch_computes(drawn: Inputs) -> None:
    """(C x)_r is the r-th of what torch's own operations make of (x_0, ..., x_(n-1)), leaf by leaf."""
    for case, do in linear(drawn):
        xs = case.all()
        spec = tree.structure(xs[0])
        whole = [dense(do, list(leaves)) for leaves in zip(*map(tree.leaves, xs), strict=True)]
        for rank, result in enumerate(case.simulate(do)):
            assert_same(result, tree.unflatten(spec, [results[rank] for results in whole]))


@pytest.mark.law(2)
@given(inputs(dtypes=DTYPES, cut=True))
def test_gathering_the_shards_of_a_replicated_value_gives_it_back(case: Inputs) -> None:
    """AG ∘ shard = id on a replicated value."""
    replicated = case.of(0)
    for result in case.simulate(lambda _: comm.all_gather(own(replicated, case.dim), dim=case.dim)):
        assert_same(result, replicated)


@pytest.mark.law(2)
@given(inputs(dtypes=DTYPES))
def test_stacking_keeps_each_value(case: Inputs) -> None:
    """AG(tiled=False)[r] = x_r."""
    everyone = case.all()
    for result in case.simulate(lambda x: comm.all_gather(x, tiled=False)):
        for rank, value in enumerate(everyone):
            assert_same(tree.map(lambda leaf, rank=rank: leaf[rank], result), value)


@pytest.mark.law(3)
@given(reductions(cut=True))
def test_reduce_scatter_is_all_reduce_then_shard(drawn: tuple[Inputs, str]) -> None:
    """RS = shard ∘ AR."""
    case, op = drawn
    agree(
        lambda x: comm.reduce_scatter(x, dim=case.dim, op=op),
        lambda x: own(comm.all_reduce(x, op=op), case.dim),
        case,
    )


@pytest.mark.law(4)
@given(reductions(cut=True))
def test_all_reduce_is_reduce_scatter_then_all_gather(drawn: tuple[Inputs, str]) -> None:
    """AR = AG ∘ RS."""
    case, op = drawn
    agree(
        lambda x: comm.all_reduce(x, op=op),
        lambda x: comm.all_gather(comm.reduce_scatter(x, dim=case.dim, op=op), dim=case.dim),
        case,
    )


@pytest.mark.law(3)
@given(inputs(cut=True))
def test_a_negative_dim_counts_from_the_end(case: Inputs) -> None:
    """C(dim = d - D) = C(dim = d) for tensors of D dims."""
    one = attrs.evolve(case, leaves=[leaf for leaf in tree.leaves(case.leaves) if len(leaf.shape) == case.dim + 1])
    agree(lambda x: comm.reduce_scatter(x, dim=-1), lambda x: comm.reduce_scatter(x, dim=case.dim), one)
    agree(lambda x: comm.all_gather(x, dim=-1), lambda x: comm.all_gather(x, dim=case.dim), one)


@pytest.mark.law(3)
@given(reductions())
def test_reduce_is_all_reduce_on_one_rank(drawn: tuple[Inputs, str]) -> None:
    """RD(dst)_r = AR_r where r = dst, else 0; BC(dst) ∘ RD(dst) = AR."""
    case, op = drawn
    dst = case.seed % case.size
    for rank, (at_one, at_all, spread) in enumerate(
        case.simulate(
            lambda x: (
                comm.reduce(x, dst, op=op),
                comm.all_reduce(x, op=op),
                comm.broadcast(comm.reduce(x, dst, op=op), dst),
            )
        )
    ):
        assert_same(at_one, at_all if rank == dst else tree.map(torch.zeros_like, at_all))
        assert_same(spread, at_all)


@pytest.mark.law(8)
@given(
    inputs(dtypes=[dtype for dtype in ADDABLE if dtype != torch.uint8], cut=True),
    st.tuples(st.integers(-2, 2), st.integers(-2, 2)),
)
def test_all_reduce_is_linear(drawn: Inputs, factors: tuple[int, int]) -> None:
    """AR(a x + b y) = a AR(x) + b AR(y); and so for every C that has a transpose."""
    a, b = factors

    def combine(x: Any, y: Any) -> Any:
        return tree.map(lambda left, right: a * left + b * right, x, y)

    for case, do in linear(drawn):
        both = simulate(case, lambda x, y, do=do: (do(combine(x, y)), combine(do(x), do(y))), "x", "y")
        for mixed, apart in both:
            assert_same(mixed, apart, bits=False)  # -2 * 0 is -0


@pytest.mark.law(10)
@given(inputs(dtypes=REAL), st.sampled_from(["min", "max"]))
def test_the_extremes_are_idempotent(case: Inputs, op: str) -> None:
    """AR_max² = AR_max, AR_min² = AR_min."""
    agree(lambda x: comm.all_reduce(comm.all_reduce(x, op=op), op=op), lambda x: comm.all_reduce(x, op=op), case)


@pytest.mark.law(10)
@given(inputs(dtypes=SMOOTH))
def test_the_mean_is_idempotent(case: Inputs) -> None:
    """AR_avg² = AR_avg, where n divides the sum; AR_avg = AR_sum / n."""

    def program(x: Any) -> Any:
        exact = tree.map(lambda leaf: leaf * case.size, x)
        once = comm.all_reduce(exact, op="avg")
        return once, comm.all_reduce(once, op="avg"), comm.all_reduce(x)

    for once, twice, total in case.simulate(program):
        assert_same(twice, once, bits=False)
        assert_same(once, total, bits=False)  # the mean of n x is the sum of x


@pytest.mark.law(10)
@given(inputs(dtypes=ADDABLE))
def test_all_reduce_twice_is_n_times(case: Inputs) -> None:
    """AR_sum² = n · AR_sum."""
    agree(
        lambda x: comm.all_reduce(comm.all_reduce(x)),
        lambda x: tree.map(lambda leaf: leaf * case.size, comm.all_reduce(x)),
        case,
        bits=False,
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(x: Any) -> list[int]:
    """Where the leaves' storages begin; empty ones have no place."""
    return [leaf.untyped_storage().data_ptr() for leaf in tree.leaves(x) if leaf.numel()]


def keeps_to_itself(do: Do, x: Any) -> Any:
    """Calls a collective and checks that the input keeps its values and its memory to itself."""
    before = tree.map(torch.clone, x)
    versions = [leaf._version for leaf in tree.leaves(x)]
    y = do(x)
    assert_same(x, before)
    assert versions == [leaf._version for leaf in tree.leaves(x)]
    assert not set(memory(x)) & set(memory(y))
    return y


@pytest.mark.law(11)
@given(reductions(cut=True))
def test_no_collective_touches_its_input(drawn: tuple[Inputs, str]) -> None:
    """No collective changes its input or shares memory with it, nor do two results share memory, on any ranks."""
    for case, do in rows(*drawn):
        places = memory(case.simulate(lambda x, do=do: (x, keeps_to_itself(do, x))))  # of all ranks, all alive
        assert len(places) == len(set(places))


@pytest.mark.law(11)
@given(reductions(cut=True))
def test_no_collective_touches_its_input_in_a_world_of_one(drawn: tuple[Inputs, str]) -> None:
    """The same outside of any world, with and without a gradient to come."""
    one = attrs.evolve(drawn[0], size=1)
    for case, do in rows(one, drawn[1]):
        keeps_to_itself(do, case.of(0))
    if tree.leaves(one.leaves) and tree.leaves(one.leaves)[0].dtype in SMOOTH:
        for case, do in rows(one, "sum"):
            keeps_to_itself(do, live(case.of(0)))


# -- coalescing and groups --------------------------------------------------------------------------------------------


@pytest.mark.law(12)
@given(reductions(cut=True))
def test_a_tree_is_a_call_for_each_leaf(drawn: tuple[Inputs, str]) -> None:
    """C = tree_map(C)."""
    for case, do in rows(*drawn):
        agree(do, lambda x, do=do: tree.map(do, x), case)


ELEMENTWISE = {"all_reduce", "reduce", "broadcast", "permute", "transfer", "copy_to", "reduce_from"}


@pytest.mark.law(12)
@given(reductions(cut=True), st.integers(1, 7))
def test_buckets_change_nothing(drawn: tuple[Inputs, str], bucket: int) -> None:
    """C ∘ flatten = flatten ∘ tree_map(C) for elementwise C, whatever the bucket size."""
    case, op = drawn

    def flatten(x: Any) -> Tensor:
        flats = [leaf.reshape(-1) for leaf in tree.leaves(x)]
        return torch.cat(flats) if flats else torch.empty(0)

    for do in (do for _, do in rows(case, op) if do.name in ELEMENTWISE):
        agree(lambda x, do=do: do(flatten(x)), lambda x, do=do: flatten(tree.map(do, x)), case)
        agree(lambda x, do=do: do(flatten(x)), lambda x, do=do: flatten(do(list(flatten(x).split(bucket)))), case)


GRIDS = st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2)])


@st.composite
def grids(draw: st.DrawFn, *, ops: bool = False) -> tuple[Inputs, tuple[int, int], str]:
    """Inputs for the ranks of a mesh of two axes."""
    a, b = draw(GRIDS)
    op = draw(st.sampled_from(["sum", "min", "max"])) if ops else "sum"
    case = draw(inputs(sizes=st.just(a * b), dtypes=ADDABLE if op == "sum" else REAL, cut=True, max_leaves=3))
    return case, (a, b), op


@pytest.mark.law(13)
@given(grids(ops=True))
def test_all_reduce_goes_axis_by_axis(drawn: tuple[Inputs, tuple[int, int], str]) -> None:
    """AR over G×H = AR_G ∘ AR_H = AR_H ∘ AR_G, and so for min and max."""
    case, (a, b), op = drawn

    def program(x: Any) -> Any:
        mesh = comm.mesh(g=a, h=b)
        return (
            comm.all_reduce(x, op=op),
            comm.all_reduce(comm.all_reduce(x, mesh["h"], op=op), mesh["g"], op=op),
            comm.all_reduce(comm.all_reduce(x, mesh["g"], op=op), mesh["h"], op=op),
        )

    for whole, one, other in case.simulate(program):
        assert_same(one, whole, bits=False)
        assert_same(other, whole, bits=False)


@pytest.mark.law(14)
@given(grids())
def test_all_reduce_goes_by_levels(drawn: tuple[Inputs, tuple[int, int], str]) -> None:
    """Hierarchical: AG_in ∘ AR_out ∘ RS_in = AR."""
    case, (a, b), _ = drawn

    def program(x: Any) -> Any:
        mesh = comm.mesh(outer=a, inner=b)
        shard = comm.reduce_scatter(x, mesh["inner"], dim=case.dim)
        return comm.all_gather(comm.all_reduce(shard, mesh["outer"]), mesh["inner"], dim=case.dim), comm.all_reduce(x)

    for levels, flat in case.simulate(program):
        assert_same(levels, flat, bits=False)


@pytest.mark.law(15)
@given(grids())
def test_sharding_goes_axis_by_axis(drawn: tuple[Inputs, tuple[int, int], str]) -> None:
    """RS_b ∘ RS_a = RS over (a, b), and AG_a ∘ AG_b = AG over (a, b)."""
    case, (a, b), _ = drawn

    def program(x: Any) -> Any:
        mesh, dim = comm.mesh(a=a, b=b), case.dim
        scattered = comm.reduce_scatter(comm.reduce_scatter(x, mesh["a"], dim=dim), mesh["b"], dim=dim)
        gathered = comm.all_gather(comm.all_gather(x, mesh["b"], dim=dim), mesh["a"], dim=dim)
        return scattered, comm.reduce_scatter(x, dim=dim), gathered, comm.all_gather(x, dim=dim)

    for scattered, scattered_at_once, gathered, gathered_at_once in case.simulate(program):
        assert_same(scattered, scattered_at_once, bits=False)
        assert_same(gathered, gathered_at_once)


# -- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.law(16)
@given(inputs(dtypes=SMOOTH, cut=True, max_leaves=3))
def test_autograd_applies_the_adjoint(drawn: Inputs) -> None:
    """<C x, y> = <x, Cᵀ y>, summed over the ranks, with autograd's Cᵀ; a replicated value counts once, and stays replicated."""
    for case, do in linear(drawn):

        def program(values: Any, case: Inputs = case, do: Do = do) -> Any:
            x = live(case.of(0) if do.shared_in else values)
            out = do(x)
            y = values_like(case, out, "y", shared=do.shared_out)
            back = pull(out, x, y)
            return dot(out, y), dot(x, back), out, back

        lefts, rights, outs, backs = zip(*case.simulate(program), strict=True)
        assert (lefts[0] if do.shared_out else sum(lefts)) == (rights[0] if do.shared_in else sum(rights)), do
        for shared, values in ((do.shared_out, outs), (do.shared_in, backs)):
            for other in values[1:] if shared else ():
                assert_same(other, values[0])


@pytest.mark.law(16)
@given(inputs(dtypes=SMOOTH, cut=True, max_leaves=3))
def test_the_transposes_by_name(drawn: Inputs) -> None:
    """ARᵀ = AR, AGᵀ = RS, BCᵀ = RD, gatherᵀ = scatter, A2A(s,c)ᵀ = A2A(c,s), PM(p)ᵀ = PM(p⁻¹), with the same dims and roots;
    a message's is one back; copy_toᵀ = AR, reduce_fromᵀ = id, scatter_toᵀ = AG, gather_fromᵀ = own slice."""
    for case, do in linear(drawn):
        if do.name == "uneven":  # its transpose has no name
            continue

        def program(values: Any, case: Inputs = case, do: Do = do) -> Any:
            x = live(values)
            out = do(x)
            y = values_like(case, out, "y")
            return pull(out, x, y), transpose(do)(y)

        for by_autograd, by_name in case.simulate(program):
            assert_same(by_autograd, by_name)


@pytest.mark.law(17)
@given(inputs(dtypes=SMOOTH, cut=True, max_leaves=3))
def test_the_adjoint_of_the_adjoint(drawn: Inputs) -> None:
    """Cᵀᵀ = C: differentiating y -> Cᵀ y gives C back."""
    for case, do in linear(drawn):

        def program(values: Any, case: Inputs = case, do: Do = do) -> Any:
            x = live(values)
            out = do(x)
            y = live(values_like(case, out, "y"))
            back = pull(out, x, y, create_graph=True)
            z = values_like(case, back, "z")
            return pull(back, y, z), do(z)

        for twice, once in case.simulate(program):
            assert_same(twice, once)


Derivatives = list[tuple[Tensor, Tensor, Tensor]]  # on each rank: a loss, its gradient, its Hessian's product with v


def ranks_derivatives(case: Inputs, do: Do) -> Derivatives:
    def program(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = live(case.of(0) if do.shared_in else values)
        out = do(x)
        loss = (values_like(case, out, "w", shared=do.shared_out) * out**3).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        v = values_like(case, x, "v", shared=do.shared_in)
        (product,) = torch.autograd.grad((gradient * v).sum(), x)
        return loss, gradient, product

    return case.simulate(program)


def dense_derivatives(case: Inputs, do: Do) -> Derivatives:
    """The same without ranks; a replicated input is one variable, and of a replicated loss there is one."""
    n = case.size
    xs = [live(case.of(0))] if do.shared_in else [live(value) for value in case.all()]
    outs = dense(do, xs * (n // len(xs)))
    ws = [
        attrs.evolve(case, leaves=Leaf(tuple(out.shape), out.dtype)).of(0 if do.shared_out else rank, name="w")
        for rank, out in enumerate(outs)
    ]
    plain = attrs.evolve(case, leaves=attrs.evolve(case.leaves, memory="dense"))
    vs = [plain.of(rank, name="v") for rank in range(len(xs))]
    losses = [(w * out**3).sum() for w, out in zip(ws, outs, strict=True)]
    some = {"allow_unused": True, "materialize_grads": True}  # a broadcast uses one rank's x
    loss = torch.stack(losses[:1] if do.shared_out else losses).sum()
    gradients = torch.autograd.grad(loss, xs, create_graph=True, **some)
    along = torch.stack([(gradient * v).sum() for gradient, v in zip(gradients, vs, strict=True)]).sum()
    products = torch.autograd.grad(along, xs, **some)
    times = n // len(xs)
    return list(zip(losses, gradients * times, products * times, strict=True))


@pytest.mark.law(17)
@given(inputs(dtypes=[torch.float64], cut=True, max_leaves=1))
def test_second_derivatives_are_those_of_the_dense_program(drawn: Inputs) -> None:
    """For f(x) = Σ_r <w_r, (C x)_r³>: values, ∇f and ∇²f v of the ranks' program and of the dense one agree."""
    for leaf in tree.leaves(drawn.leaves):
        for case, do in linear(attrs.evolve(drawn, leaves=leaf)):
            if 0 in case.leaves.shape:  # torch.cat of nothing has no graph
                continue
            for got, expected in zip(ranks_derivatives(case, do), dense_derivatives(case, do), strict=True):
                assert_same(got, expected, bits=False)


@pytest.mark.law(16)
@given(inputs(dtypes=[torch.float64], max_leaves=3))
def test_the_mean_has_a_gradient(case: Inputs) -> None:
    """AR_avgᵀ y = AR_sum(y / n)."""

    def program(values: Any) -> Any:
        x = live(values)
        out = comm.all_reduce(x, op="avg")
        y = values_like(case, out, "y")
        return pull(out, x, y), comm.all_reduce(tree.map(lambda leaf: leaf / case.size, y))

    for by_autograd, by_name in case.simulate(program):
        assert_same(by_autograd, by_name)


@pytest.mark.law(16)
def test_leaves_without_gradients_travel_along() -> None:
    """Integers, bools and constants in a tree with trained leaves keep their values and get no gradient."""

    def program() -> Any:
        rank = comm.world().rank
        x = {"w": torch.tensor([1.0 + rank], requires_grad=True), "i": torch.tensor([rank]), "c": torch.tensor([2.0])}
        y = comm.all_gather({**x, "b": torch.tensor([rank == 1])})
        assert (y["w"].requires_grad, y["i"].requires_grad, y["b"].requires_grad) == (True, False, False)
        (y["w"] * torch.tensor([3.0, 5.0]) * (y["i"] + 1) * y["c"]).sum().backward()
        return y["i"].tolist(), y["b"].tolist(), x["w"].grad.tolist(), x["c"].grad

    assert comm.simulate(program, world_size=2) == [
        ([0, 1], [False, True], [12.0], None),
        ([0, 1], [False, True], [40.0], None),
    ]


@pytest.mark.parametrize("op", ["min", "max", "product"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_has_no_transpose_has_no_gradient(op: str, world_size: int) -> None:
    """The forward value is there; the backward pass says why there is no gradient, in a world of one too."""

    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        for y in (comm.all_reduce(x, op=op), comm.reduce(x, op=op), comm.reduce_scatter(x, op=op, dim=0)):
            assert y.requires_grad
            with pytest.raises(ValueError, match=rf"\(.*op='{op}'.*\) has no transpose, so no gradient flows through it"):
                y.sum().backward()

    comm.simulate(program, world_size=world_size)
