"""Law 18: every world gives the same bits."""

from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from functional_ds import comm, tree
from functional_ds.testing import assert_same
from tests.comm import cases


def _settled(x: Any, case: cases.Case) -> Any:
    """The tree without what torch itself leaves open, and does one way in a vector and another in its tail: which of two
    NaNs survives an operation, and which of 0 and -0 is the larger."""

    def settle(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        one_zero = leaf + 0.0 if case.options.get("op") in ("min", "max") else leaf  # -0 + 0 is 0
        return torch.where(one_zero.isnan(), torch.nan, one_zero)

    return tree.map(lambda leaf: settle(leaf) if isinstance(leaf, Tensor) else leaf, x)


@pytest.mark.law(18)
@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 1), (3, 1), (4, 2)])
def test_gloo_gives_the_bits_of_the_simulator(world_size: int, ranks_per_node: int) -> None:
    """spawn(program) = simulate(program), bit for bit, for every row of the table: dtypes, dims, ops, roots, memory
    layouts, coalesced trees, asynchronous calls, gradients and gradients of gradients, on floats that round."""
    drawn = cases.draw(max(192, settings.default.max_examples), world_size, seed=world_size)
    spawned = comm.spawn(cases.run, drawn, world_size=world_size, ranks_per_node=ranks_per_node)
    simulated = comm.simulate(cases.run, drawn, world_size=world_size, ranks_per_node=ranks_per_node)
    assert len(spawned) == world_size
    for rank in range(world_size):
        for case, real, model in zip(drawn, spawned[rank], simulated[rank], strict=True):
            try:
                assert_same(_settled(real, case), _settled(model, case))
            except AssertionError as error:
                error.add_note(f"on rank {rank} in {case}")
                raise


def nccl_has(case: cases.Case) -> bool:
    """NCCL reduces no 16-bit integers and multiplies no complex numbers."""
    if case.name not in cases.REDUCTIONS | {"reduce_from"}:
        return True
    dtypes = {leaf.dtype for leaf in tree.leaves(case.leaves)}
    return torch.int16 not in dtypes and not (case.options.get("op") == "product" and any(d.is_complex for d in dtypes))


@pytest.mark.law(18)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccl_gives_the_bits_of_the_simulator() -> None:
    """A world of one on NCCL runs every row's lowering; with one rank there is no order of sums to differ."""
    drawn = [case for case in cases.draw(240, 1, seed=1) if nccl_has(case)]
    assert {case.name for case in drawn} == {row.name for row in comm.table.TABLE}
    (spawned,) = comm.spawn(cases.run, drawn, "cuda", world_size=1)
    (simulated,) = comm.simulate(cases.run, drawn, world_size=1)
    for case, real, model in zip(drawn, spawned, simulated, strict=True):
        try:
            assert_same(_settled(real, case), _settled(model, case))
        except AssertionError as error:
            error.add_note(f"in {case}")
            raise
