"""One rank whose fellows do as it does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm
from functional_ds.testing import assert_same


def program(device: str) -> list[torch.Tensor]:
    """Every collective, of the same values on all ranks, over the world and along a mesh."""
    x, found = torch.arange(12.0, device=device), []
    half = comm.mesh(a=2, b=comm.world().size // 2)["b"]
    for group in (comm.world(), half):
        found += [
            comm.all_reduce(x, group),
            comm.start(comm.all_gather, x, group).wait(),
            comm.reduce_scatter(x.repeat(group.size), group.channel("other")),
            comm.all_to_all(x.repeat(group.size), group),
            comm.broadcast(x, 0, group),
            comm.reduce(x, 0, group),
            comm.permute(x, [(i, (i + 1) % group.size) for i in range(group.size)], group),
        ]
    return found


@given(n=st.sampled_from((2, 4, 6)), rank=st.integers(0, 5))
def test_it_is_that_rank_where_all_are_alike(n: int, rank: int) -> None:
    """symmetric(p, rank=r) = simulate(p)[r] for a program whose ranks pass the same; on meta tensors, its shapes."""
    expected = comm.simulate(program, "cpu", world_size=n)[rank % n]
    assert_same(comm.symmetric(program, "cpu", world_size=n, rank=rank % n), expected)
    bare = comm.symmetric(program, "meta", world_size=n, rank=rank % n)
    assert all(x.is_meta for x in bare)
    assert [(x.shape, x.dtype) for x in bare] == [(x.shape, x.dtype) for x in expected]


def test_it_leaves_the_world_and_generators_as_they_were() -> None:
    """Also where the program fails, and within a simulated rank."""
    before = torch.get_rng_state()

    def failing() -> None:
        torch.rand(3)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        comm.symmetric(failing, world_size=3)
    assert comm.world().size == 1
    assert torch.equal(torch.get_rng_state(), before)

    def within() -> tuple[int, int]:
        return comm.symmetric(lambda: comm.world().size, world_size=9), comm.world().size

    assert comm.simulate(within, world_size=2) == [(9, 2)] * 2


def test_bad_input() -> None:
    """No such rank."""
    with pytest.raises(ValueError, match="rank=3, world_size=3"):
        comm.symmetric(lambda: None, world_size=3, rank=3)
