"""All-gather in ⌈log2 n⌉ messages per rank (Bruck, Ho, Kipnis, Upfal, Weathersby 1997), for small values."""

from functools import lru_cache
from time import perf_counter

import torch
from torch import Tensor

from functional_ds.comm.exchange import permute
from functional_ds.comm.record.group import Group, Ready
from functional_ds.comm.record.ledger import LedgerCall
from functional_ds.comm.table.collective import Call, CallContext
from functional_ds.comm.table.exchanges import PERMUTE
from functional_ds.comm.table.permutation import Permutation
from functional_ds.comm.table.rows import ALL_GATHER


def bruck(x: Tensor, group: Group) -> Tensor:
    """``comm.all_gather(x, group)`` by Bruck's algorithm, without autograd: [m, ...] -> [n m, ...].

    In round k rank r sends the pieces that it has to rank ``(r - 2ᵏ) % n``. Cost: each rank sends n - 1 times ``x``, in
    ⌈log2 n⌉ messages. If messages take no time (``World.at_once``), one call replaces the rounds, which ledgers still record.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: bruck(torch.tensor([comm.world().rank]), comm.world()).tolist(), world_size=3)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    x = x.detach()
    if group.world.at_once and group.size > 1:
        return _in_one_call(x, group)
    known = x.unsqueeze(0)  # [k, m, ...], place i from rank + i
    while (have := len(known)) < group.size:
        received = permute(known[: group.size - have], _back(group.size, have), group)
        known = torch.cat([known, received])
    return known.roll(group.rank, 0).flatten(0, 1)


def _in_one_call(x: Tensor, group: Group) -> Tensor:
    began, have = perf_counter(), 1
    (gathered,) = group.world.start(Call(ALL_GATHER, {"dim": 0, "tiled": True}), [x], group, beside=False).wait()
    while group.world.ledgers and have < group.size:
        count = min(have, group.size - have)
        call, sent = Call(PERMUTE, {"perm": _back(group.size, have)}), gathered[: count * len(x)]
        made = LedgerCall(call, [sent], CallContext(call.options, group.rank, group.size), group.name, group.ranks)
        for ledger in group.world.ledgers:
            ledger.record(made, Ready([sent]), began, early=False).wait()
        began, have = perf_counter(), have + count
    return gathered


@lru_cache
def _back(n: int, by: int) -> Permutation:
    return Permutation.shift(n, -by)
