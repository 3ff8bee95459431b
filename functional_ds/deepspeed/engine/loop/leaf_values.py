"""Whole leaves of a state whose shards are on several ranks, read and written by name."""

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.state_dict.describe import TensorShard, as_tensors, describe
from functional_ds.step.state.state import State

PARAMS = ("masters", "params")
"""The roles in which a state may have a leaf, the most exact first."""


def own_shards(state: State, roles: Sequence[str], leaf: str) -> dict[str, list[TensorShard]]:
    """This rank's shards of a leaf, by role."""
    wanted = {f"{role}/{leaf}": role for role in roles}
    by_role: dict[str, list[TensorShard]] = {role: [] for role in roles}
    for shard in describe(as_tensors(state)):
        if shard.name in wanted:
            by_role[wanted[shard.name]].append(shard)
    return by_role


def has_role(state: State, roles: Sequence[str]) -> bool:
    """Whether this rank has any leaf in one of these roles, or no optimizer state at all. Not collective."""
    here = {shard.name.partition("/")[0] for shard in describe(as_tensors(state))}
    return any(role in here for role in roles) or not any(role.startswith("optimizer.") for role in here)


def gathered(state: State, roles: Sequence[str], leaf: str) -> Tensor:
    """A whole leaf in the first of these roles that any rank has. Collective over the world.

    Args:
        state: the state.
        roles: "params", "masters", "optimizer.exp_avg" and so on.
        leaf: its path.

    Raises:
        KeyError: no rank has it, in any role.

    Cost: an all-gather of the ranks' parts.
    """
    by_role = own_shards(state, roles, leaf)
    mine = {
        role: [(shard.offset, shard.view.numel(), torch.Size(shard.shape), shard.view.dtype) for shard in shards]
        for role, shards in by_role.items()
    }
    everyones = comm.all_gather_object(mine)
    role = next((candidate for candidate in roles if any(theirs[candidate] for theirs in everyones)), None)
    if role is None:
        raise KeyError(f"no rank has {leaf!r} as {' or '.join(roles)}")
    shape, dtype = next(theirs[role][0][2:] for theirs in everyones if theirs[role])
    device = state.step.device
    none = torch.empty(0, dtype=dtype, device=device)
    parts = comm.all_gather(torch.cat([none, *(shard.view.reshape(-1).to(device) for shard in by_role[role])]), uneven=True)
    ranges = [(offset, numel) for theirs in everyones for offset, numel, *_ in theirs[role]]
    whole = torch.empty(shape.numel(), dtype=dtype, device=device)
    for (offset, numel), part in zip(ranges, parts.split([numel for _, numel in ranges]), strict=True):
        whole[offset : offset + numel] = part
    return whole.view(shape)


def refuse_disk(state: State, leaf: str) -> None:
    """Raises an error if values cannot be written in place.

    Raises:
        ValueError: the state is on disk.
    """
    if any(callable(getattr(held, "read", None)) for held in tree.leaves(state)):
        raise ValueError(f"{leaf!r}: what is offloaded to a disk cannot be set; load a checkpoint instead")


def written(state: State, roles: Sequence[str], leaf: str, value: Tensor) -> bool:
    """Writes a whole leaf's values into all of these roles that this rank has; whether there was one. Not collective.

    Raises:
        ValueError: another shape; the state is on a disk.
    """
    refuse_disk(state, leaf)
    wrote = False
    with torch.no_grad():
        for shards in own_shards(state, roles, leaf).values():
            for shard in shards:
                if tuple(value.shape) != tuple(shard.shape):
                    raise ValueError(f"{leaf!r} has shape {list(shard.shape)}, and the value {list(value.shape)}")
                part = value.detach().reshape(-1)[shard.offset : shard.offset + shard.view.numel()]
                shard.view.copy_(part.to(shard.view.device, shard.view.dtype))
                wrote = True
    return wrote
