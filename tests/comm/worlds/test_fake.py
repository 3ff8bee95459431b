"""Tensors without values: a collective of torch's fake tensors gives what it would have the shape of, and sends nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from functional_ds import comm

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": comm.all_reduce,
    "all_gather": lambda x: comm.all_gather(x, dim=1),
    "stacked": lambda x: comm.all_gather(x, tiled=False),
    "reduce_scatter": comm.reduce_scatter,
    "all_to_all": lambda x: comm.all_to_all(x, split_dim=0, concat_dim=1),
    "broadcast": lambda x: comm.broadcast(x, 1),
    "permute": lambda x: comm.permute(x, [(0, 1), (1, 0)]),
    "copy_to": comm.copy_to,
    "reduce_from": comm.reduce_from,
    "scatter_to": comm.scatter_to,
    "gather_from": lambda x: comm.gather_from(x, dim=1),
    "send": lambda x: comm.send(x, 1) if comm.world().rank == 0 else comm.recv(x, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_fake_result_has_the_shape_of_a_real_one(name: str) -> None:
    """Forward and backward, on each rank alone: none waits for another."""

    def program() -> Any:
        x = torch.ones(4, 6, requires_grad=True)
        real = CALLS[name](x)
        with comm.ledger() as book, FakeTensorMode(allow_non_fake_inputs=True):
            fake_x = torch.empty(4, 6, requires_grad=True)
            fake = CALLS[name](fake_x)
            assert isinstance(fake, FakeTensor)
            (grad,) = torch.autograd.grad([fake], [fake_x], [torch.empty_like(fake)])
            assert grad.shape == x.shape
        return real.shape == fake.shape and real.dtype == fake.dtype and book.bytes == 0

    assert comm.simulate(program, world_size=2) == [True, True]
