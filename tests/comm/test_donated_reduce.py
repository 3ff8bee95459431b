"""``all_reduce(donate=True)``: the same sums, in the memory of what is summed where the transport can."""

from typing import Any

import pytest
import torch
from hypothesis import given

import functional_ds as fds
from functional_ds import comm, tree
from functional_ds.testing import Inputs, assert_same, inputs
from functional_ds.transforms import zero


@pytest.mark.law(31)
@given(inputs())
def test_it_is_the_reduction(case: Inputs) -> None:
    """With the bits and the cost of the plain one, synchronously and not."""

    def program(x: Any) -> None:
        with comm.ledger() as plain:
            wanted = comm.all_reduce(x)
        with comm.ledger() as donated:
            found = comm.all_reduce(tree.map(torch.clone, x), donate=True)
        assert donated.rows == plain.rows
        assert_same(found, wanted)
        assert_same(comm.start(comm.all_reduce, tree.map(torch.clone, x), donate=True).wait(), wanted)

    case.simulate(program)


def reduced(numel: int, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether the sums are those of the plain call, which leaves its value alone, and lie where the values lay."""
    torch.manual_seed(comm.world().rank)
    x = torch.randn(numel, 2).to(dtype)
    before, place = x.clone(), x.data_ptr()
    wanted = comm.all_reduce(x)
    alone = torch.equal(x, before)
    found = comm.start(comm.all_reduce, x, donate=True).wait()
    return alone and torch.equal(found, wanted), found.data_ptr() == place


def copies() -> tuple[bool, bool]:
    """Under ``checked`` nothing is written into an input, and a value of which a part was donated stays whole beside it."""
    with comm.debug.checked():
        x = torch.full((50_000,), 1.0 + comm.world().rank)
        total = comm.start(comm.all_reduce, x, donate=True).wait()
        untouched = bool((x == 1.0 + comm.world().rank).all())
    return untouched, bool((total == 6.0).all())


def same_gradients() -> list[float]:
    step = zero(0)(fds.train_step(lambda p, x: (p["w"] @ x).square().sum(), fds.sgd(1e-4)))
    state, _ = step(step.init({"w": torch.ones(300, 200)}), torch.ones(200) + comm.world().rank)
    return step.params(state)["w"].unique().tolist()


def on_ranks() -> Any:
    sums = [reduced(numel, dtype) for numel in (3, 700_001) for dtype in (torch.float32, torch.bfloat16)]
    return sums, copies(), same_gradients()


def test_processes_reduce_in_place() -> None:
    """Three ranks, of which the third adds its own value last."""
    found, simulated = comm.spawn(on_ranks, world_size=3), comm.simulate(on_ranks, world_size=3)
    assert found[0][0] == found[1][0] == found[2][0] == [(True, True)] * 4
    assert [one[1:] for one in found] == [one[1:] for one in simulated]
    assert all(one[1] == (True, True) for one in found)


def test_a_donated_value_has_no_graph() -> None:
    def program() -> None:
        with pytest.raises(ValueError, match="would detach its values from the autograd graph"):
            comm.all_reduce(torch.ones(3, requires_grad=True), donate=True)
        with torch.no_grad():
            comm.all_reduce(torch.ones(3, requires_grad=True), donate=True)

    comm.simulate(program, world_size=2)
