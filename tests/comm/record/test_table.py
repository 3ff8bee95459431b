"""A row of the table of collectives has all that the library asks of it."""

import pytest

from functional_ds import comm
from functional_ds.comm.record.collective import Traffic
from functional_ds.comm.record.table import ALL_REDUCE, as_sent, check_primitives

PARTS = {"volume": lambda leaf, here: 0, "result": as_sent, "traffic": Traffic(), "role": "exchange"}


@pytest.mark.parametrize("part", PARTS)
def test_a_row_that_communicates_says_all_its_parts(part: str) -> None:
    parts = {name: value for name, value in PARTS.items() if name != part}
    with pytest.raises(TypeError, match=f"Collective 'shift' communicates, so it needs {part}"):
        comm.table.Collective(name="shift", denotation=lambda xs, options: list(xs), primitive="permute", **parts)
    comm.table.Collective(name="shift", denotation=lambda xs, options: list(xs), primitive="permute", **PARTS)


def test_a_back_end_carries_out_every_row() -> None:
    primitives = {row.primitive for row in comm.table.TABLE if row.primitive}
    check_primitives("all", primitives)
    with pytest.raises(ImportError, match="the back end some does not carry out all_gather, permute"):
        check_primitives("some", primitives - {"permute", "all_gather"})


@pytest.mark.parametrize(("row", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0), ("permute", 1.0)])
def test_bus_factors_are_those_of_nccl_tests(row: str, factor: float) -> None:
    assert {each.name: each for each in comm.table.TABLE}[row].traffic.bus(4) == factor
    assert ALL_REDUCE.traffic.bus(1) == 0.0
