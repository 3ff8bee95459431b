"""An all-gather in ⌈log2 n⌉ messages a rank (Bruck, Ho, Kipnis, Upfal, Weathersby 1997), for small values."""

from functools import lru_cache

import torch
from torch import Tensor

from functional_ds.comm.exchange import permute
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.permutation import Permutation

__all__ = ["bruck"]


def bruck(x: Tensor, group: Group) -> Tensor:
    """``comm.all_gather(x, group)``: [m, ...] -> [n m, ...], rank r's piece at place r.

    In round k each rank sends what it has to the rank 2ᵏ places before it. Cost: n - 1 times the elements of ``x``, as in
    ``comm.all_gather``, in ⌈log2 n⌉ messages instead of n - 1.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: bruck(torch.tensor([comm.world().rank]), comm.world()).tolist(), world_size=3)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    known = x.unsqueeze(0)  # [k, m, ...], place i from rank + i
    while (have := len(known)) < group.size:
        received = permute(known[: group.size - have], _back(group.size, have), group)
        known = torch.cat([known, received])
    return known.roll(group.rank, 0).flatten(0, 1)


@lru_cache
def _back(n: int, by: int) -> Permutation:
    return Permutation.shift(n, -by)
