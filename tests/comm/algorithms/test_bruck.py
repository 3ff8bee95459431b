"""An all-gather in few messages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm
from functional_ds.comm.algorithms.bruck import bruck


@pytest.mark.law(39)
@given(n=st.integers(1, 9), rows=st.integers(0, 3), seed=st.integers(0, 99))
def test_it_is_all_gather_in_fewer_messages(n: int, rows: int, seed: int) -> None:
    def program() -> tuple[bool, int, int]:
        here = comm.world()
        x = torch.arange(2 * rows).view(rows, 2) + 100 * here.rank
        with comm.ledger() as book:
            found = bruck(x, here)
        return torch.equal(found, comm.all_gather(x)), book.calls, book.elements

    expected = (True, math.ceil(math.log2(n)), (n - 1) * 2 * rows)
    assert comm.simulate(program, world_size=n, seed=seed) == [expected] * n
