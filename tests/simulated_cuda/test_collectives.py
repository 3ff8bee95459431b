"""Collectives on a simulated device: a stream of each communicator's own, and waits that order what follows."""

from contextlib import suppress

import pytest
import torch

from functional_ds import comm
from functional_ds.testing import assert_same, simulated_cuda
from tests.simulated_cuda.programs import sent


def test_collectives_give_the_hosts_values() -> None:
    for found in comm.simulate(sent, world_size=2):
        for device, host in found:
            assert_same(device, host)


def test_an_input_that_is_written_before_the_wait_is_a_race() -> None:
    def program() -> list[str]:
        with simulated_cuda(check=False) as gpu:
            x = torch.ones(4, device="cuda")
            pending = comm.start(comm.all_reduce, x)
            x.add_(1)
            with suppress(comm.errors.CommError):  # the simulator sees the write, too
                pending.wait()
            return [each.text for each in gpu.races]

    for (text,) in comm.simulate(program, world_size=2):
        assert text.startswith(
            "add_ on the default stream writes float32[4], which nccl all_reduce on NCCL's stream of 'world'"
        )


def test_a_wait_on_one_stream_orders_no_other() -> None:
    """The result is read on a side stream that never waited for the one that did."""

    def program(waits: bool) -> int:
        with simulated_cuda(check=False) as gpu:
            side = torch.cuda.Stream()
            x = torch.ones(4, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            total = comm.start(comm.all_reduce, x).wait()
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                total.sum()
            torch.cuda.synchronize()
            return len(gpu.races)

    assert comm.simulate(program, True, world_size=2) == [0, 0]
    assert comm.simulate(program, False, world_size=2) == [1, 1]


@pytest.mark.parametrize("size", [1, 2])
def test_host_tensors_go_as_ever(size: int) -> None:
    def program() -> torch.Tensor:
        with simulated_cuda():
            return comm.all_reduce(torch.tensor([comm.world().rank + 1]))

    assert comm.simulate(program, world_size=size) == [torch.tensor([sum(range(1, size + 1))])] * size
