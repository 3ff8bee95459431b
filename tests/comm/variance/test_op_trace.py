"""What is traced of an operation: numbers of values, and their checksums."""

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds import comm
from functional_ds.comm.variance.op_trace import OpTrace, _checksum
from tests.comm.variance.test_follow import matrix


def test_a_number_is_of_one_value() -> None:
    """Also if a tensor has the storage id that another one had; the memory of a traced tensor is freed with it."""
    numbers = []
    with OpTrace() as trace:
        for _ in range(40):
            x = torch.ones(64)
            storage = StorageWeakRef(x.untyped_storage())
            numbers.append(trace.number(x))
            del x
            assert storage.expired()
    assert len({*numbers}) == 40


def test_views_have_the_checksums_of_their_bytes() -> None:
    """They are not computed again for a result that has the bytes of its input."""
    aten = torch.ops.aten
    for x in (matrix(1).T, torch.tensor([[-0.0, 0.0]]), torch.zeros(2, 2)[:, :1], torch.empty(0, 3)):
        with OpTrace() as trace:
            made = [
                x.detach(),
                x.unsqueeze(0),
                x.squeeze(),
                x.clone(),
                aten.alias(x),
                x.T.view(x.T.shape),
                x.T.view(torch.int32),
            ]
        for one in made:
            number = trace.number(one)
            assert (trace.bits[number], trace.zero[number]) == _checksum(one)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.int8, torch.bool, torch.bfloat16, torch.complex64])
def test_zeros_of_a_dtype(dtype: torch.dtype) -> None:
    """Also of those that torch cannot count."""
    assert _checksum(torch.tensor([0, 0]).to(dtype))[1]
    assert not _checksum(torch.tensor([0, 1]).to(dtype))[1]


def test_a_million_storages_are_not_kept() -> None:
    """Only the numbers of storages that live are."""
    sizes = []

    def program() -> None:
        for _ in range(3000):
            torch.ones(1)
        trace: Any = comm.world().world.watch
        sizes.append(len(trace.trace._memory))

    comm.simulate(program, world_size=1, variance=True)
    assert sizes[0] < 2100
