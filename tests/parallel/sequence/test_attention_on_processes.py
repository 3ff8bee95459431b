"""Attention over cut sequences on real processes."""

import torch
from torch import Tensor

from functional_ds import comm, seq
from tests.parallel.sequence.attention_cases import Case

CASE = Case(2, seq.SequenceLayout("zigzag"), 16, heads=(3, 1), dtype=torch.float32)


def on_a_process() -> list[Tensor]:
    """A rank's attention and gradients, by each way."""
    group, found = comm.world(), []
    for attend in (
        seq.ring(group, layout=CASE.layout),
        seq.ring(group, layout=CASE.layout, save_blocks=True),
        seq.ulysses(None, group, layout=CASE.layout),
        seq.gathered(group, layout=CASE.layout),
    ):
        *inputs, grad = (CASE.own(x, group.rank) for x in CASE.inputs())
        leaves = [x.requires_grad_() for x in inputs]
        o = attend(*leaves, causal=True)
        found += [o.detach(), *torch.autograd.grad((o * grad).sum(), leaves)]
    return found


def test_processes_give_the_simulators_bits() -> None:
    found, expected = comm.spawn(on_a_process, world_size=2), comm.simulate(on_a_process, world_size=2)
    assert all(torch.equal(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True))
