"""Whole leaves of a state whose shards are on several ranks, read and written by name."""

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.state_dict.describe import TensorShard, as_tensors, describe
from functional_ds.step.state import State

__all__ = ["PARAMS", "gathered", "written"]

PARAMS = ("masters", "params")
"""The roles in which a state may have a leaf, the most exact first."""


def _own(state: State, roles: Sequence[str], leaf: str) -> dict[str, list[TensorShard]]:
    wanted = {f"{role}/{leaf}": role for role in roles}
    found: dict[str, list[TensorShard]] = {role: [] for role in roles}
    for shard in describe(as_tensors(state)):
        if shard.name in wanted:
            found[wanted[shard.name]].append(shard)
    return found


def gathered(state: State, roles: Sequence[str], leaf: str) -> Tensor | None:
    """A whole leaf in the first of these roles that any rank has; None if there is none. Collective over the world.

    Args:
        state: the state.
        roles: "params", "masters", "optimizer.exp_avg" and the like.
        leaf: its path.

    Cost: an all-gather of as much as the rank with the most has.
    """
    own = _own(state, roles, leaf)
    mine = {role: [(shard.shape, shard.offset, shard.view.numel()) for shard in shards] for role, shards in own.items()}
    everyones = comm.all_gather_object(mine) if comm.world().size > 1 else [mine]
    role = next((each for each in roles if any(theirs[each] for theirs in everyones)), None)
    if role is None:
        return None
    shape = next(rows[0][0] for rows in (theirs[role] for theirs in everyones) if rows)
    dtype, device = _kind(own[role], state, everyones, role)
    most = max(sum(numel for _, _, numel in theirs[role]) for theirs in everyones)
    flat = torch.zeros(most, dtype=dtype, device=device)
    if own[role]:
        values = torch.cat([shard.view.reshape(-1) for shard in own[role]]).to(device)
        flat[: values.numel()] = values
    rows = comm.all_gather(flat).view(len(everyones), most) if len(everyones) > 1 else flat.view(1, most)
    whole = torch.empty(shape.numel() if isinstance(shape, torch.Size) else _numel(shape), dtype=dtype, device=device)
    for row, theirs in zip(rows, everyones, strict=True):
        place = 0
        for _, offset, numel in theirs[role]:
            whole[offset : offset + numel] = row[place : place + numel]
            place += numel
    return whole.view(shape)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _kind(own: Sequence[TensorShard], state: State, everyones: Sequence[object], role: str) -> tuple[torch.dtype, torch.device]:
    dtype = own[0].view.dtype if own else None
    if len(everyones) > 1:
        dtype = next(each for each in comm.all_gather_object(dtype) if each is not None)
    assert dtype is not None, role
    return dtype, state.step.device


def written(state: State, roles: Sequence[str], leaf: str, value: Tensor) -> bool:
    """Writes a whole leaf's values into all of these roles that this rank has; whether there was one. Not collective.

    Raises:
        ValueError: another shape.
    """
    found = False
    with torch.no_grad():
        for shards in _own(state, roles, leaf).values():
            for shard in shards:
                if tuple(value.shape) != tuple(shard.shape):
                    raise ValueError(f"{leaf!r} has shape {list(shard.shape)}, and the value {list(value.shape)}")
                part = value.detach().reshape(-1)[shard.offset : shard.offset + shard.view.numel()]
                shard.view.copy_(part.to(shard.view.device, shard.view.dtype))
                found = True
    return found
