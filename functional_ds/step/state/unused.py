"""Trained leaves that no rank's loss has used: found by each rank, agreed on, and counted, so that optimizers skip them."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from functional_ds.base import tree
from functional_ds.base.device import arriving
from functional_ds.comm.record.call_recorder import current_recorder
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_selection import Unused

from .state import State

__all__ = ["summed_over_ranks", "unused_leaves", "with_idle", "with_unused", "without"]


class Summing(Protocol):
    """The part of a step that ranks agree by."""

    @property
    def skips_unused(self) -> bool: ...

    def leaf_map(self, state: State) -> LeafMap: ...

    def sum_over_ranks(self, state: State, scalars: Any) -> Any: ...

    @property
    def sums(self) -> bool: ...


def with_unused(step: Summing, state: State, places: Iterable[int]) -> State:
    """The state after a backward pass that gave no gradient to the leaves at these places of the leaf map.

    What another pass of the same optimizer step has used stays used.
    """
    found = list(places)
    leaves = step.leaf_map(state).leaves if found else ()
    return without(state, frozenset(leaves[place].path for place in found))


def without(state: State, paths: frozenset[str]) -> State:
    """The state after a backward pass that gave no gradient to the leaves of these paths."""
    return tree.replace(state, unused=paths if state.unused is None else state.unused & paths)


def summed_over_ranks(step: Summing, state: State, scalars: Any) -> tuple[Any, ...]:
    """A step's scalars summed over the ranks, and the paths of the trained leaves that none of them used, or None.

    Cost: 4 bytes a leaf more in the sum that is sent anyway. A rank whose own loss used all its leaves reads nothing back, and
    need not: then no leaf of it is unused.
    """
    own = state.unused
    if not step.skips_unused or own is None or not step.sums:
        return (*step.sum_over_ranks(state, scalars), own if own and step.skips_unused else None)
    if own and current_recorder() is not None:
        raise RuntimeError(
            f"the loss does not use {', '.join(map(repr, sorted(own)[:3]))}, and whether another rank does is read on the host "
            "in every step: give them gradients of zero with fds.train_step(..., unused='zeros')"
        )
    leaf_map = step.leaf_map(state)
    leaves, device = leaf_map.leaves, state.step.device
    paths: Sequence[str] = ()
    if own or leaf_map.other_paths:  # with those that other ranks of a pipeline hold, in one order on all ranks
        here = {leaf.path for leaf in leaves}
        paths = sorted(here.union(leaf_map.other_paths))
        used = arriving(torch.tensor([float(path in here and path not in own) for path in paths]), device)
    else:
        used = torch.ones(len(leaves), device=device)
    *scalars, users = step.sum_over_ranks(state, (*scalars, used))
    if not own or users.is_meta:
        return (*scalars, None)
    nobody = {path for path, count in zip(paths, users.tolist(), strict=True) if not count}
    return (*scalars, own & nobody or None)


def unused_leaves(step: Summing, state: State) -> Unused | None:
    """What an optimizer has to know of unused leaves; None if the loss has used all of them in every step."""
    if not step.skips_unused or not (state.unused or state.idle):
        return None
    return Unused(state.unused or frozenset(), {path: int(count) for path, count in state.idle.items()})


def with_idle(state: State, unused: frozenset[str] | None, before: Any) -> State:
    """The state after an update that has left these leaves alone, unless it was skipped: then its step is the one before."""
    if not unused:
        return state
    idle = dict(state.idle)
    if int(state.step) > int(before):
        idle |= {path: idle.get(path, torch.zeros((), dtype=torch.int64)) + 1 for path in sorted(unused)}
    return tree.replace(state, unused=None, idle=idle)
