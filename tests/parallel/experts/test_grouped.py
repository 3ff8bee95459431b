"""Products of uneven groups of rows: one matrix for each group, as a loop over groups computes them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_ds import comm, moe
from functional_ds.sharding.leaf_slice import LeafSlice
from tests.parallel.experts.oracle import INNER, M, close, gated, gradients, mixture, numbers, on, own, weights_of


def loop(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """One product after the other."""
    return torch.cat([piece @ matrix.T for piece, matrix in zip(rows.split(counts), weight, strict=True)])


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    width=st.sampled_from((1, 3, 4, 8)),
    out=st.sampled_from((1, 5, 8)),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
    transposed=st.booleans(),
    known=st.booleans(),
)
def test_groups_are_a_loop(counts: list[int], width: int, out: int, dtype: torch.dtype, transposed: bool, known: bool) -> None:
    """Value and gradients, for any strides, dtypes and counts, none included; small integers are exact."""
    generator = torch.Generator().manual_seed(sum(counts))

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype).requires_grad_()

    rows = integers(sum(counts), width)
    stored = integers(len(counts), *((width, out) if transposed else (out, width)))
    weight = stored.mT if transposed else stored
    groups = moe.RowGroups.of(counts if known else torch.tensor(counts))
    y, expected = moe.grouped_linear(rows, weight, groups), loop(rows, weight, counts)
    assert torch.equal(y, expected)
    probe = integers(*y.shape).detach()
    found = torch.autograd.grad(y, [rows, stored], probe)
    for a, b in zip(found, torch.autograd.grad(expected, [rows, stored], probe), strict=True):
        assert torch.equal(a, b)
    expanded = torch.autograd.grad(moe.grouped_linear(rows, weight, groups).sum(), [rows])[0]  # a gradient without strides
    assert torch.equal(expanded, torch.autograd.grad(loop(rows, weight, counts).sum(), [rows])[0])


def test_second_derivatives() -> None:
    rows, weight = numbers(5, 4).requires_grad_(), numbers(2, 3, 4).requires_grad_()
    groups = moe.RowGroups.of([2, 3])
    assert torch.autograd.gradgradcheck(lambda x, w: moe.grouped_linear(x, w, groups) ** 2, (rows, weight))


def test_biases_go_with_their_experts() -> None:
    bias = torch.tensor([[1.0], [2.0], [3.0]])
    y = moe.grouped_linear(torch.zeros(4, 2), torch.zeros(3, 1, 2), moe.RowGroups.of([1, 0, 3]), bias=bias)
    assert y.flatten().tolist() == [1.0, 3.0, 3.0, 3.0]


def test_autocast_and_shapes_without_values() -> None:
    groups = moe.RowGroups.of([1, 2])
    with torch.autocast("cpu", torch.bfloat16):
        assert moe.grouped_linear(torch.ones(3, 8), torch.ones(2, 8, 8), groups).dtype == torch.bfloat16
    with FakeTensorMode():
        fake = torch.empty(3, 8, requires_grad=True)
        y = moe.grouped_linear(fake, torch.empty(2, 5, 8, requires_grad=True), groups)
        assert torch.autograd.grad(y.sum(), [fake])[0].shape == (3, 8)


def test_sizes_that_do_not_fit_are_named() -> None:
    groups = moe.RowGroups.of([1, 2])
    with pytest.raises(ValueError, match="the rows come in 2 groups"):
        moe.grouped_linear(torch.ones(3, 8), torch.ones(3, 8, 8), groups)
    with pytest.raises(ValueError, match=r"rows of shape \[3, 7\]"):
        moe.grouped_linear(torch.ones(3, 7), torch.ones(2, 8, 8), groups)
    with pytest.raises(ValueError, match="cast one"):
        moe.grouped_linear(torch.ones(3, 8).double(), torch.ones(2, 8, 8), groups)


# -- experts cut over tensor-parallel ranks --------------------------------------------------------------------------------


@pytest.mark.law(40, 46)
@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (2, 2), (2, 3)])
def test_experts_cut_over_ep_and_tp_are_one_device(ep: int, tp: int) -> None:
    """Value and gradients of slices; tensor-parallel ranks have the same tokens and get the same bits."""
    tokens, params = 6, weights_of()
    logits, x = numbers(ep, tokens, 4, seed=3), numbers(ep, tokens, M, seed=4)

    def cuts(rank: int) -> dict[str, LeafSlice]:
        return {"gate_up": LeafSlice.even(1, [INNER, INNER], tp, rank), "down": LeafSlice.even(2, INNER, tp, rank)}

    def program() -> dict[str, Tensor]:
        mesh = comm.mesh(ep=ep, tp=tp)
        mine = own(params, mesh["ep"])
        leaves = on({name: cut.of(mine[name]) for name, cut in cuts(mesh["tp"].rank).items()} | {"x": x[mesh["ep"].rank]})
        f = moe.gated_mlp(leaves["gate_up"], leaves["down"], tp=mesh["tp"])
        y = moe.exchange(f, leaves["x"], routing=moe.route(logits[mesh["ep"].rank], 2), group=mesh["ep"])
        return {"y": y.detach(), **gradients((y**2).sum(), leaves)}

    leaves = on({"x": x, **params})
    routing = moe.route(logits, 2)
    y = mixture({name: leaves[name] for name in params}, leaves["x"].view(-1, M), routing).view_as(x)
    expected = gradients((y**2).sum(), leaves)
    ranks = comm.simulate(program, world_size=ep * tp)
    for place, found in enumerate(ranks):
        e, t = divmod(place, tp)
        close(found["y"], y[e].detach())
        close(found["x"], expected["x"][e])
        for name, cut in cuts(t).items():
            close(found[name], cut.of(expected[name].chunk(ep)[e]))
        assert torch.equal(found["y"], ranks[e * tp]["y"])
        assert torch.equal(found["x"], ranks[e * tp]["x"])


def test_mlps_without_gates_and_whole_gated_ones() -> None:
    params = weights_of(2)
    rows = numbers(5, M)
    groups = moe.RowGroups.of([2, 3])
    y = moe.gated_mlp(params["gate_up"], params["down"])(rows, groups)
    close(y[2:], gated(rows[2:], params["gate_up"][1], params["down"][1]))
    plain = moe.mlp(params["gate_up"][:, :INNER], params["down"], activation=torch.tanh)(rows, groups)
    close(plain[:2], (rows[:2] @ params["gate_up"][0, :INNER].T).tanh() @ params["down"][0].T)
