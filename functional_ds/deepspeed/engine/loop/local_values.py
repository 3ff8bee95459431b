"""This rank's parts of stage-3 parameters, of their gradients and of their optimizer's states."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.sharding.layout import Layout
from functional_ds.state_dict.describe import TensorShard, as_tensors, describe
from functional_ds.step.state.state import State

from .engine_loop import EngineLoop
from .gathered_parameters import owner_of, safe_get_full_grad, safe_set_full_grad, state_roles, writing
from .leaf_values import PARAMS, own_shards, refuse_disk

__all__ = [
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


@attrs.frozen(eq=False)
class _Local:
    """A trained parameter's part on this rank: ranges of its flattened elements, which are its optimizer's."""

    loop: EngineLoop
    path: str
    ranges: tuple[tuple[int, int], ...]  # (first element, number)
    persists: bool  # whether every rank has the parameter whole
    shared: bool  # whether only some ranks have the same parameter, as experts'

    @staticmethod
    def of(param: nn.Parameter, what: str) -> "_Local | None":
        """None of a parameter that is not trained.

        Raises:
            ValueError: it is of no engine, or of one whose params are whole.
        """
        loop, path = owner_of(param, what)
        if loop.live.shows:
            raise ValueError(f"{what}: {path!r} is whole, as in all stages but 3; call {what.replace('local', 'full')}")
        known = loop.step.leaf_map(loop.state)
        index = next((i for i, leaf in enumerate(known.leaves) if leaf.path == path), None)
        if index is None:
            return None
        ranges = sorted((shard.offset, shard.numel) for shard in known.shards if shard.leaf == index)
        layout: Layout = loop.state.slots["zero"].layout
        segment = next(each for each in layout.segments for slot in each.slots if layout.paths[slot.leaf] == path)
        return _Local(loop, path, tuple(ranges), segment.persistent, segment.sharers is not None)

    @property
    def numel(self) -> int:
        return sum(count for _, count in self.ranges)

    def views(self, shards: Sequence[TensorShard]) -> list[Tensor]:
        """These elements in shards that have them all."""
        found = []
        for first, count in self.ranges:
            for shard in shards:
                low, high = max(first, shard.offset), min(first + count, shard.offset + shard.view.numel())
                if high > low:
                    found.append(shard.view[low - shard.offset : high - shard.offset])
        return found

    def get(self, state: State, roles: Sequence[str]) -> Tensor | None:
        """The elements in the first of these roles that this rank has, in fp32; None where it has none."""
        views = [self.views(shards) for shards in own_shards(state, roles, self.path).values() if shards]
        if views:
            return torch.cat(views[0]).float() if views[0] else torch.empty(0, device=state.step.device)
        there = {shard.name.partition("/")[0] for shard in describe(as_tensors(state))}
        return torch.empty(0, device=state.step.device) if not self.ranges and there.intersection(roles) else None

    def set(self, state: State, roles: Sequence[str], value: Tensor, what: str) -> None:
        """Writes the elements, also into what every rank has whole, with all ranks' parts."""
        refuse_disk(state, self.path)
        if value.numel() != self.numel:
            raise ValueError(f"{what}: this rank has {self.numel} elements of {self.path!r}, and the value {value.numel()}")
        flat = value.detach().reshape(-1)
        pieces = list(zip(self.ranges, flat.split([count for _, count in self.ranges]), strict=True))
        with torch.no_grad():
            for role, shards in own_shards(state, roles, self.path).items():
                if role == "params" and self.persists:
                    self._set_whole(shards, pieces, what)
                elif shards:
                    for view, piece in zip(self.views(shards), (piece for _, piece in pieces if piece.numel()), strict=True):
                        view.copy_(piece.to(view.device, view.dtype))

    def _set_whole(self, shards: Sequence[TensorShard], pieces: Any, what: str) -> None:
        if self.shared:
            raise ValueError(f"{what}: {self.path!r} is whole on some ranks alone; call {what.replace('local', 'full')}")
        (shard,) = shards
        mine = [(first, piece.cpu()) for (first, _), piece in pieces]
        for theirs in comm.all_gather_object(mine):
            for first, piece in theirs:
                shard.view[first : first + piece.numel()].copy_(piece.to(shard.view.device, shard.view.dtype))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of a stage-3 parameter's master, flat, in fp32; None of one that is not trained.

    Law: the parts of all ranks, in the order of ranks, are the whole parameter. DeepSpeed's parts are equal, with padding; here
    a parameter may lie on some of the ranks alone, and others have an empty part. All local functions have the same elements.

    Raises:
        ValueError: the engine is not of stage 3, as in DeepSpeed.
    """
    local = _Local.of(param, "safe_get_local_fp32_param")
    return None if local is None else local.get(local.loop.state, PARAMS)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the master, and what the forward pass sees. Every rank calls it.

    Collective for parameters below ``param_persistence_threshold``, which stay whole on every rank.

    Raises:
        ValueError: another number of elements; as ``safe_get_local_fp32_param``.
    """
    local = _Local.of(param, "safe_set_local_fp32_param")
    if local is not None:
        with writing(local.loop):
            local.set(local.loop.state, PARAMS, value, "safe_set_local_fp32_param")


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of a tensor of the optimizer's state; None if there is none."""
    local = _Local.of(param, "safe_get_local_optimizer_state")
    return None if local is None else local.get(local.loop.state, state_roles(optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets this rank's part of a tensor of the optimizer's state.

    Args:
        param: whose.
        value: as many elements as ``safe_get_local_optimizer_state`` gives.
        optim_state_key: "exp_avg" and the like.

    Raises:
        KeyError: there is no such state.
        ValueError: as ``safe_set_local_fp32_param``.
    """
    local = _Local.of(param, "safe_set_local_optimizer_state")
    if local is not None:
        if local.get(local.loop.state, state_roles(optim_state_key)) is None:
            raise KeyError(f"safe_set_local_optimizer_state: the optimizer keeps no {optim_state_key!r}")
        with writing(local.loop):
            local.set(local.loop.state, state_roles(optim_state_key), value, "safe_set_local_optimizer_state")


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the gradient that the next update has, in fp32, before clipping; None where there is none yet."""
    local = _Local.of(param, "safe_get_local_grad")
    found = None if local is None else local.loop.summed()
    if local is None or found is None:
        return None
    sums, weight = found
    part = local.get(tree.replace(local.loop.state, optimizer=sums), ("optimizer",))
    return None if part is None else part / weight


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the gradient that the next update has.

    Raises:
        RuntimeError: there is none yet.
        ValueError: as ``safe_set_local_fp32_param``.
    """
    local = _Local.of(param, "safe_set_local_grad")
    if local is None:
        return
    found = local.loop.summed()
    if found is None:
        raise RuntimeError("safe_set_local_grad: the ranks have not summed gradients yet; call it before engine.step()")
    sums, weight = found
    scaled = value.to(weight.device) * weight
    local.set(tree.replace(local.loop.state, optimizer=sums), ("optimizer",), scaled, "safe_set_local_grad")


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Sets the gradient of each trained parameter to ``update_func(gradient, parameter)``. Collective.

    Raises:
        RuntimeError: there are no gradients yet.
    """
    for param in param_list:
        if param.requires_grad:
            gradient = safe_get_full_grad(param)
            if gradient is None:
                raise RuntimeError("safe_update_full_grad_vectorized: there are no gradients yet; call it before engine.step()")
            safe_set_full_grad(param, update_func(gradient, param))
