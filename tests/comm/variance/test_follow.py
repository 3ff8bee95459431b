"""What becomes of values that were declared: through operations, memory, collectives, and along several axes."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functional_ds import comm

Function = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x, a matrix w and indices i


def rank() -> int:
    return comm.world().rank


def says(program: Callable[[], Any], world_size: int = 2) -> str:
    """What is wrong with a program; empty if nothing is."""
    try:
        comm.simulate(program, world_size=world_size, variance=True)
    except comm.errors.VarianceError as error:
        return str(error)
    return ""


def matrix(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- terms of a sum ----------------------------------------------------------------------------------------------------


def _in_place(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    return x.clone().add_(x).mul_(w).div_(2)


def _into_a_buffer(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    flat = x.new_empty(20)
    flat[:16].copy_(x.reshape(-1))
    flat[16:].zero_()
    return flat[2:18] * 3


def _foreach(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    found = torch._foreach_mul([x, x + x], 2.0)
    torch._foreach_add_(found, [x, x])
    return found[1]


FUNCTIONS: dict[str, Function] = {
    "plus itself": lambda x, w, i: x + x.T,
    "minus": lambda x, w, i: x - 2 * x,
    "negative": lambda x, w, i: -x,
    "scaled": lambda x, w, i: x * 2 / 3,
    "weighted": lambda x, w, i: w * x,
    "divided": lambda x, w, i: x / w,
    "matmul": lambda x, w, i: w @ x @ w,
    "linear": lambda x, w, i: F.linear(x, w),
    "einsum": lambda x, w, i: torch.einsum("ab,cb->ca", x, w),
    "addmm of terms": lambda x, w, i: torch.addmm(x, x, w),
    "sum": lambda x, w, i: x.sum() + x.mean(),
    "cat": lambda x, w, i: torch.cat([x, x.flip(0)]),
    "stack": lambda x, w, i: torch.stack([x, x]),
    "views": lambda x, w, i: x.T[1:, ::2].reshape(-1).view(2, 3).unsqueeze(0).expand(2, 2, 3),
    "pieces": lambda x, w, i: x.chunk(2)[1] + x.unbind(1)[0],
    "index": lambda x, w, i: x[i] + x.index_select(0, i),
    "gather": lambda x, w, i: x.gather(1, i[:, None]),
    "embedding": lambda x, w, i: F.embedding(i, x),
    "pad and roll": lambda x, w, i: F.pad(x, (1, 2)).roll(1, 0).cumsum(1),
    "triangle": lambda x, w, i: x.tril() + x.diagonal(),
    "index_add": lambda x, w, i: torch.zeros_like(x).index_add(0, i, x),
    "scatter_add": lambda x, w, i: torch.zeros_like(x).scatter_add(0, i[:, None].expand(4, 4), x),
    "where": lambda x, w, i: torch.where(w > 0, x, 0.0),
    "masked": lambda x, w, i: x.masked_fill(w > 0, 0.0),
    "cast": lambda x, w, i: x.to(torch.complex128).real,
    "convolution": lambda x, w, i: F.conv1d(x[None], w[:, :, None]),
    "in place": _in_place,
    "into a buffer": _into_a_buffer,
    "foreach": _foreach,
    "scaled sum": lambda x, w, i: torch.add(x, x.T, alpha=3) - x.sub(x.T, alpha=2),
    "lerp": lambda x, w, i: torch.lerp(x, x.T, 0.3),
    "index_put": lambda x, w, i: x.new_empty(4, 4).index_put((i,), x),
    "plus zero": lambda x, w, i: x + torch.zeros_like(x) + 0,
    "plus one": lambda x, w, i: x + 1,
    "plus what all have": lambda x, w, i: x + w,
    "plus in place": lambda x, w, i: x.clone().add_(w),
    "addmm of products": lambda x, w, i: torch.addmm(x, w, w),
    "bias": lambda x, w, i: F.linear(x, w, w[0]),
    "where, else one": lambda x, w, i: torch.where(w > 0, x, 1.0),
    "masked by one": lambda x, w, i: x.masked_fill(w > 0, 1.0),
    "padded by one": lambda x, w, i: F.pad(x, (1, 2), value=1.0),
    "lerp to what all have": lambda x, w, i: torch.lerp(x, w, 0.3),
    "index_copy of what all have": lambda x, w, i: x.index_copy(0, i[:1], w[:1]),
    "square": lambda x, w, i: x * x,
    "power": lambda x, w, i: x**2,
    "matmul with itself": lambda x, w, i: x @ x,
    "denominator": lambda x, w, i: w / x,
    "norm": lambda x, w, i: x.norm(),
    "abs": lambda x, w, i: x.abs(),
    "relu": lambda x, w, i: F.relu(x),
    "gelu": lambda x, w, i: F.gelu(x),
    "exp": lambda x, w, i: x.exp(),
    "softmax": lambda x, w, i: x.softmax(0),
    "log_softmax": lambda x, w, i: x.log_softmax(0),
    "layer norm": lambda x, w, i: F.layer_norm(x, (4,)),
    "max": lambda x, w, i: x.amax(0),
    "clamp": lambda x, w, i: x.clamp(-1, 1),
    "sign": lambda x, w, i: x.sign(),
    "round": lambda x, w, i: x.round(),
    "sort": lambda x, w, i: x.sort(0).values,
    "cross entropy": lambda x, w, i: F.cross_entropy(x, i),
    "attention": lambda x, w, i: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "foreach norm": lambda x, w, i: torch.stack(torch._foreach_norm([x, x])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_terms_go_through_what_is_linear_and_nothing_else(name: str) -> None:
    """``f(x_0 + x_1) = f(x_0) + f(x_1)`` iff ``f`` is accepted."""
    function, w, i = FUNCTIONS[name], matrix(1), torch.tensor([2, 0, 3, 1])
    terms = [matrix(2), matrix(3)]
    together = function(terms[0] + terms[1], w, i)
    linear = torch.allclose(together, function(terms[0], w, i) + function(terms[1], w, i))

    def program() -> Tensor:
        return comm.reduce_from(function(comm.partial(terms[rank()].clone()), comm.replicated(w), i))

    said = says(program)
    assert (said == "") == linear, said
    if linear:
        assert torch.allclose(comm.simulate(program, world_size=2)[0], together)
    else:
        assert re.search(r" at test_follow\.py:\d+ .* along group 'world' \[0, 1\] \(partial since comm\.partial at", said)


def test_terms_are_not_scaled_by_what_differs() -> None:
    def program() -> None:
        comm.partial(matrix(1 + rank())) * matrix(5 + rank())

    assert "multiplies a value that differs between ranks (ranks 0 and 1 " in says(program)


def test_terms_are_not_masked_by_what_differs() -> None:
    assert "where at test_follow.py" in says(lambda: torch.where(matrix(5 + rank()) > 0, comm.partial(matrix(rank())), 0.0))


def test_terms_are_not_scaled_by_other_parts_of_what_all_have() -> None:
    def program(scale: float) -> None:
        part = comm.replicated(matrix(7)).chunk(2)[rank()]
        comm.partial(matrix(rank())[:2]) * (part if scale == 1 else scale * part)

    assert "(ranks 0 and 1 take other ones) by a partial sum" in says(lambda: program(1))
    assert "only ranks [0] call mul" in says(lambda: program(2))


def test_terms_are_not_moved() -> None:
    assert "all_gather at test_follow.py:" in says(lambda: comm.all_gather(comm.partial(matrix(rank()))))
    assert "gets a term of a partial sum" in says(lambda: comm.all_reduce(comm.partial(matrix(rank())), op="max"))
    assert says(lambda: comm.all_gather(comm.varying(comm.partial(matrix(rank()))))) == ""


def test_an_algorithm_of_messages_sums_terms() -> None:
    for all_reduce in (
        comm.algorithms.ring,
        comm.algorithms.halving_doubling,
        comm.codecs.compressed(comm.all_reduce, comm.codecs.Blocks(8)),
    ):
        assert says(lambda sums=all_reduce: torch.relu(sums(comm.partial(matrix(rank()))))) == ""


# -- sums of what all have ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [comm.all_reduce, comm.reduce_scatter, comm.reduce_from, comm.partial])
def test_a_sum_of_what_all_have_is_named(reduce: Any) -> None:
    x = matrix(1)
    assert "so it is 2 times too large" in says(lambda: reduce(comm.replicated(x) * 2))
    assert says(lambda: reduce(x * 2)) == ""  # nobody says that it must be equal
    assert says(lambda: reduce(comm.replicated(x) * (1 + rank()))) == ""  # it no longer is
    assert says(lambda: reduce(comm.replicated(x).chunk(2)[rank()])) == ""
    assert says(lambda: reduce(comm.replicated(x) * 0)) == ""


def test_a_mean_of_what_all_have_is_not() -> None:
    assert says(lambda: comm.all_reduce(comm.replicated(matrix(1)), op="avg")) == ""


def test_what_is_added_to_each_ranks_own_counts_n_times() -> None:
    def program(use: Any) -> None:
        use(comm.varying(matrix(rank())).sum(), comm.replicated(matrix(7)).sum())

    assert "sums what add at" in says(lambda: program(lambda mine, ours: comm.all_reduce(2 * (mine + ours))))
    assert "sums what stack at" in says(lambda: program(lambda mine, ours: comm.all_reduce(torch.stack([mine, ours]))))
    assert says(lambda: program(lambda mine, ours: comm.all_reduce((mine + ours).square()))) == ""
    assert says(lambda: program(lambda mine, ours: comm.all_reduce(mine * ours))) == ""


def test_what_the_last_rank_alone_does_is_followed() -> None:
    """Ranks with equal operations are followed as one; a number of one rank alone, or a term that is zero on others, is not."""

    def plus(x: Tensor) -> Tensor:
        return comm.reduce_from(comm.partial(x) + 1 * (rank() == 2))

    def sums(x: Tensor) -> Tensor:
        return comm.all_reduce((comm.varying(x * rank()) + comm.replicated(matrix(1))) * (rank() == 2))

    assert "adds 1 to each rank's term" in says(lambda: plus(matrix(rank())), 3)
    assert "the former counts 3 times" in says(lambda: sums(matrix(2)), 3)


def test_a_bias_of_each_row_counts_once_a_row() -> None:
    assert says(lambda: comm.all_reduce((comm.varying(matrix(rank())) + comm.replicated(matrix(7)[0])).sum())) == ""

    linear = torch.nn.functional.linear
    losses = lambda x, w, b: linear(x, w, b).square().mean(-1)  # noqa: E731
    ours = lambda: (comm.replicated(matrix(7)), comm.replicated(matrix(7)[0]))  # noqa: E731
    assert says(lambda: comm.all_reduce(losses(comm.varying(matrix(rank())), *ours()))) == ""
    assert says(lambda: comm.all_reduce(linear(comm.varying(matrix(rank())), *ours()).mean(0))) == ""


def test_rows_with_a_bias_may_be_gathered_by_a_sum() -> None:
    """Each rank's rows, among zeros: the bias counts once a row."""

    def program() -> None:
        rows, bias = comm.varying(matrix(rank())), comm.replicated(matrix(7)[0])
        mine = rank() * len(rows) + torch.arange(len(rows))
        comm.all_reduce(rows.new_zeros(2 * len(rows), rows.shape[1]).index_copy(0, mine, rows + bias))

    assert says(program) == ""


def test_each_rank_may_take_another_part_of_what_all_have() -> None:
    def program(use: Any) -> None:
        use(comm.partial(matrix(rank())[:2]), comm.replicated(matrix(7)).chunk(2)[rank()])

    assert says(lambda: program(lambda term, part: term + part)) == ""
    assert says(lambda: program(lambda term, part: comm.reduce_from(term + 2 * part))) == ""
    assert says(lambda: program(lambda term, part: comm.all_reduce(comm.varying(term) + part))) == ""


CUTS = {
    "chunk": lambda x: x.chunk(2)[rank()],
    "slice": lambda x: x[4 * rank() : 4 * rank() + 4],
    "stride": lambda x: x[rank() :: 2],
    "unbind": lambda x: x.view(2, 4, 4).unbind()[rank()],
    "index": lambda x: x.index_select(0, torch.arange(4) + 4 * rank()),
}
USES: dict[str, Any] = {
    "sub": torch.sub,
    "mul": torch.mul,
    "where": lambda x, y: torch.where(y > 0, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("use", USES)
def test_all_ranks_may_draw_a_batch_and_cut_it(cut: str, use: str) -> None:
    """The targets of a rank's rows are no mask; a whole draw beside them is."""

    def program(cuts: bool) -> None:
        draw = torch.Generator().manual_seed(0)
        x, y = (torch.randn(8, 4, generator=draw, dtype=torch.float64) for _ in range(2))
        rows = (CUTS[cut](x) @ matrix(7)).tanh()
        comm.all_reduce(USES[use](rows, CUTS[cut](y) if cuts else y[:4]).sum())

    assert says(lambda: program(True)) == ""
    assert "brings a random draw with equal bits on all ranks" in says(lambda: program(False))


def test_gradients_that_share_memory_are_what_each_is() -> None:
    """Autograd gives both terms of an addition one gradient."""

    def program() -> None:
        a = comm.replicated(matrix(1).requires_grad_())
        b = comm.varying(matrix(rank()).requires_grad_())
        _, grad = torch.autograd.grad(((a + b) * matrix(rank())).sum(), [a, b])
        grad.square()

    assert says(program) == ""


# -- several axes ------------------------------------------------------------------------------------------------------


def over(axes: Any, *, claimed: str, scaled_by_rank: bool = False) -> Callable[[], Any]:
    """A sum over some axes of a 2 x 2 mesh of a value that is the same along one."""

    def program() -> None:
        mesh = comm.mesh(dp=2, tp=2)
        x = comm.replicated(matrix(mesh["dp" if claimed == "tp" else "tp"].rank), mesh[claimed])
        comm.all_reduce(x, mesh[axes])

    return program


def test_a_sum_over_two_axes_counts_what_one_axis_shares() -> None:
    """A loss that tensor-parallel ranks have alike, summed over all ranks."""
    assert says(over("dp", claimed="tp"), 4) == ""
    assert "all ranks of group 'tp' [0, 1] have alike" in says(over("tp", claimed="tp"), 4)
    assert "all_reduce at test_follow.py:" in says(over(("dp", "tp"), claimed="tp"), 4)
    assert "all ranks of group 'dp' [0, 2] have alike" in says(over(("tp", "dp"), claimed="dp"), 4)


def test_terms_along_one_axis_are_summed_along_it_and_stay_along_another() -> None:
    def program(*axes: Any) -> None:
        mesh = comm.mesh(dp=2, tp=2)
        x = comm.partial(matrix(rank()), mesh["tp"])
        for axis in axes:
            x = comm.all_reduce(x, mesh[axis])
        torch.relu(x)

    assert "acts on a partial sum along group 'tp' [0, 1]" in says(program, 4)
    assert "acts on a partial sum along group 'tp' [0, 1]" in says(lambda: program("dp"), 4)
    for axes in (("tp",), ("tp", "dp"), ("dp", "tp"), (("dp", "tp"),)):
        assert says(lambda axes=axes: program(*axes), 4) == ""


def test_what_is_the_same_along_an_axis_stays_so_through_another() -> None:
    def program(spoil: bool) -> None:
        mesh = comm.mesh(dp=2, tp=2)
        x = comm.invariant(matrix(mesh["dp"].rank), mesh["tp"])
        x = comm.all_reduce(x, mesh["dp"])
        comm.copy_to(x + (mesh["tp"].rank if spoil else 0), mesh["tp"])

    assert says(lambda: program(False), 4) == ""
    assert "copy_to at test_follow.py:" in says(lambda: program(True), 4)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clone", "detach", "t"])
def test_what_numpy_writes_is_seen_in_copies_and_views(name: str) -> None:
    def program() -> Tensor:
        buffer = torch.zeros(4, 4) + 0
        buffer.numpy()[:] = rank()
        return comm.all_reduce(comm.partial(torch.ones(4, 4) + rank()) * getattr(buffer, name)())

    assert f"get different values from {name}" in says(program)


def test_memory_that_is_written_into_is_something_else() -> None:
    def program(write: Any) -> None:
        x = comm.partial(matrix(rank()).clone())
        view = x[1]
        write(x, view)
        torch.relu(view)

    assert "relu at" in says(lambda: program(lambda x, view: None))
    assert "relu at" in says(lambda: program(lambda x, view: x.mul_(2)))
    assert says(lambda: program(lambda x, view: x.zero_())) == ""
    assert says(lambda: program(lambda x, view: x.copy_(comm.all_reduce(x)))) == ""


def test_memory_that_is_used_again_is_something_else() -> None:
    """A later tensor may get the memory of one that is gone."""

    def program() -> None:
        for _ in range(20):
            term = comm.partial(torch.full((64,), float(rank())))
            del term
            torch.relu(torch.full((64,), 1.0 + rank()))

    assert says(program) == ""


# -- draws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [torch.rand_like, torch.randn_like, lambda x: torch.bernoulli(torch.full_like(x, 0.5))])
def test_equal_draws_for_values_that_differ_are_named(noise: Any) -> None:
    def program(values: Any, ranks_apart: bool) -> None:
        if ranks_apart:
            torch.manual_seed(rank())
        x = values(torch.arange(64.0) + rank() * 64)
        x * noise(x)

    assert "brings a random draw with equal bits on all ranks" in says(lambda: program(comm.varying, False))
    assert says(lambda: program(comm.varying, True)) == ""
    assert says(lambda: program(lambda x: comm.replicated(x * 0), False)) == ""


def test_what_one_rank_draws_is_nobody_elses() -> None:
    def program() -> None:
        x = comm.varying(torch.arange(64.0))
        if rank() == 0:
            x * torch.rand(64)

    assert says(program) == ""
