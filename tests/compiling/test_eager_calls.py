"""Calls in a graph: what autograd keeps of the given tensors is found where they are when the backward pass runs."""

import pytest
import torch
from torch import Tensor

from functional_ds.compiling.graphs.eager_calls import EagerSite


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a[1:] @ b.transpose(0, 1)).square()


@pytest.mark.parametrize("begin", [0, 5])
def test_given_tensors_may_lie_elsewhere_in_the_backward_pass(begin: int) -> None:
    """Leaves of one gathered unit share memory; that of the backward pass may have another layout."""
    memory = torch.randn(40, generator=torch.Generator().manual_seed(0))
    a, b = memory[begin : begin + 9].view(3, 3), memory[20:32].view(4, 3)
    xs = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    expected = torch.autograd.grad(product(*xs).sum(), xs)
    site = EagerSite(product, (True, True), torch.empty(2, 4), ((), ()), 0, ())
    out, token = site.run([a, b])
    later = torch.cat([b.reshape(-1), a.reshape(-1), torch.zeros(9)])
    memory.zero_()
    found = site.run_backward(token, [later[12:21].view(3, 3), later[:12].view(4, 3)], torch.ones_like(out))
    assert all(map(torch.equal, found, expected))
