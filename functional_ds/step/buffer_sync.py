"""Which rank's module buffers data-parallel ranks keep, and how the ranks agree on the buffers that they write."""

from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.comm.record.call_recorder import current_recorder

from .buffers import BUFFERS, Agreement, Buffers
from .state import State

__all__ = ["agreed_anew", "synced", "synchronized", "unagreed"]


def unagreed(state: State) -> Tensor | None:
    """1.0 where this rank writes buffers that the ranks have not agreed on, else 0.0; None where ranks need not ask.

    Only modules with buffers are asked. On a GPU the answer is not waited for: all ranks must begin to write in one step.
    """
    held = state.slots.get(BUFFERS)
    if not isinstance(held, Buffers) or state.step.is_cuda or held.policy == "own" or not any(held.values.values()):
        return None
    mine = held.known.mine
    return torch.tensor(float(not all(agreed.covers(mine) for agreed in held.known.agreed.values())))


def agreed_anew(state: State, ranks: Tensor | None) -> State:
    """The state, whose ranks will agree again on the buffers that they write if any rank must; no graph of a step does."""
    if ranks is not None and current_recorder() is None and ranks.item():
        state.slots[BUFFERS].known.agreed.clear()
    return state


def synchronized(buffers: Buffers, group: comm.Group, *, policy: str | None = None) -> Buffers:
    """The buffers that the ranks of a group keep after each has run its own rows, or its own stages.

    ``"first"``: those of the group's first rank, as DistributedDataParallel has it. ``"mean"``: the mean of floating ones, the
    first rank's of others. ``"own"``: each rank keeps what it has. ``"writer"``: each of the first rank that writes it.

    Cost: in the first step, and when modules begin to write others, one small message; in each step a number, by which ranks
    say so, in the sum of the metrics, and a broadcast of the written
    buffers, or an all-reduce of them for ``"mean"``. Nothing is sent where no rank writes any.
    """
    policy = policy or buffers.policy
    if group.size == 1 or policy == "own":
        return buffers
    known = buffers.known
    mine = known.mine
    where = group.ranks, group.name
    agreed = known.agreed.get(where)
    if agreed is None or not agreed.covers(mine):
        known.agreed[where] = _agree(buffers, mine, group, by_writer=policy == "writer")
    return _exchanged(buffers, known.agreed[where], group, policy)


def synced(state: State, group: comm.Group, *, policy: str | None = None) -> State:
    """A state with such buffers; one without modules as it is."""
    held = state.slots.get(BUFFERS)
    return state.put(**{BUFFERS: synchronized(held, group, policy=policy)}) if isinstance(held, Buffers) else state


def _agree(buffers: Buffers, mine: frozenset[tuple[str, str]], group: comm.Group, *, by_writer: bool) -> Agreement:
    """Every rank says what it writes."""
    told = [(key, name, tuple(b.shape), b.dtype) for key, name in sorted(mine) if (b := buffers.values[key][name]) is not None]
    givers: dict[tuple[str, str], tuple[int, tuple[int, ...], torch.dtype]] = {}
    for rank, each in enumerate(comm.all_gather_object(told, group.channel("control"))):
        for key, name, shape, dtype in each:
            givers.setdefault((key, name), (rank if by_writer else 0, shape, dtype))
    return Agreement(mine, dict(sorted(givers.items())), by_writer)


def _exchanged(buffers: Buffers, agreed: Agreement, group: comm.Group, policy: str) -> Buffers:
    values = {key: dict(held) for key, held in buffers.values.items()}
    means = [each for each, (_, _, dtype) in agreed.givers.items() if policy == "mean" and dtype.is_floating_point]
    if means:
        found = comm.all_reduce([values[key][name] for key, name in means], group, op="avg")
        for (key, name), mean in zip(means, found, strict=True):
            values[key][name] = mean
    for giver in sorted({rank for rank, _, _ in agreed.givers.values()}):
        names = [each for each, (rank, _, _) in agreed.givers.items() if rank == giver and each not in means]
        sent = [_room(values, each, agreed, group) for each in names]
        for (key, name), value in zip(names, comm.broadcast(sent, giver, group) if names else (), strict=True):
            values[key][name] = value
    return tree.replace(buffers, values=values)


def _room(values: dict[str, dict[str, Any]], which: tuple[str, str], agreed: Agreement, group: comm.Group) -> Tensor:
    """This rank's buffer, as large as the giver's."""
    key, name = which
    found = values[key].get(name)
    _, shape, dtype = agreed.givers[which]
    if found is not None and (which in agreed.written or (tuple(found.shape), found.dtype) == (shape, dtype)):
        return found.detach()  # type: ignore[no-any-return]
    return torch.empty(shape, dtype=dtype, device=group.world.device if found is None else found.device)
