"""A row of the table of collectives has all that the library asks of it."""

import pytest

from functional_ds import comm
from functional_ds.comm.backends import gloo, nccl
from functional_ds.comm.table.collective import Traffic
from functional_ds.comm.table.rows import ALL_REDUCE, as_sent

PARTS = {
    "volume": lambda leaf, here: 0,
    "result": as_sent,
    "traffic": Traffic(),
    "gloo": gloo.permute,
    "nccl": nccl.permute,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_row_that_communicates_says_all_its_parts(part: str) -> None:
    parts = {name: value for name, value in PARTS.items() if name != part}
    with pytest.raises(TypeError, match=f"Collective 'shift' communicates, so it needs {part}"):
        comm.table.Collective(name="shift", denotation=lambda xs, options: list(xs), **parts)
    comm.table.Collective(name="shift", denotation=lambda xs, options: list(xs), **PARTS)


@pytest.mark.parametrize(("row", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0), ("permute", 1.0)])
def test_bus_factors_are_those_of_nccl_tests(row: str, factor: float) -> None:
    assert {each.name: each for each in comm.table.TABLE}[row].traffic.bus(4) == factor
    assert ALL_REDUCE.traffic.bus(1) == 0.0
