"""A parameter's values in an engine, by DeepSpeed's names: master, gradient and optimizer states, whole or this rank's part.

Local functions are for this rank's part of a stage-3 parameter, flat. Law: the parts of all ranks, in the order of ranks, are
the whole. DeepSpeed's parts are equal, with padding; here a parameter may be on only some of the ranks, and others have an
empty part. All local functions have the same elements.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from .gathered_parameters import owner_of, writing
from .leaf_values import PARAMS, gathered, has_role, own_shards, refuse_disk, written

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]

_STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum", "sum": "sums"}  # torch's names


@attrs.frozen(eq=False)
class _Local:
    """A trained parameter's part on this rank: ranges of its flattened elements, which are its optimizer's."""

    path: str
    ranges: tuple[tuple[int, int], ...]  # (first element, number)
    persists: bool  # whether every rank has the parameter whole
    shared: bool  # whether only some ranks have the same parameter, as experts'

    @staticmethod
    def of(loop: EngineLoop, path: str, what: str) -> "_Local | None":
        """None for a parameter that is not trained.

        Raises:
            ValueError: it belongs to an engine whose params are whole.
        """
        if loop.live.shows:
            raise ValueError(f"{what}: {path!r} is whole, as in all stages but 3; call {what.replace('local', 'full')}")
        known = loop.step.leaf_map(loop.state)
        index = next((i for i, leaf in enumerate(known.leaves) if leaf.path == path), None)
        if index is None:
            return None
        ranges = sorted((shard.offset, shard.numel) for shard in known.shards if shard.leaf == index)
        layout: Layout = loop.state.slots["zero"].layout
        segment = next(
            candidate for candidate in layout.segments for slot in candidate.slots if layout.paths[slot.leaf] == path
        )
        return _Local(path, tuple(ranges), segment.persistent, segment.sharers is not None)

    @property
    def numel(self) -> int:
        return sum(count for _, count in self.ranges)

    def views(self, shards: Sequence[TensorShard]) -> list[Tensor]:
        """These elements in shards that have them all."""
        views = []
        for first, count in self.ranges:
            for shard in shards:
                low, high = max(first, shard.offset), min(first + count, shard.offset + shard.view.numel())
                if high > low:
                    views.append(shard.view[low - shard.offset : high - shard.offset])
        return views

    def get(self, state: State, roles: Sequence[str]) -> Tensor | None:
        """The elements in the first of these roles that this rank has, in fp32; None where it has none."""
        views = [self.views(shards) for shards in own_shards(state, roles, self.path).values() if shards]
        if views:
            return torch.cat(views[0]).float() if views[0] else torch.empty(0, device=state.step.device)
        there = {shard.name.partition("/")[0] for shard in describe(as_tensors(state))}
        return torch.empty(0, device=state.step.device) if not self.ranges and there.intersection(roles) else None

    def set(self, state: State, roles: Sequence[str], value: Tensor, what: str) -> None:
        """Writes the elements, and into whole tensors of every rank, with all ranks' parts."""
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


@attrs.frozen(eq=False)
class _Value:
    """A tensor that belongs to a parameter.

    Attributes:
        call: the caller, for errors.
        loop: of the engine that has the parameter.
        path: the parameter's.
        roles: it is in the first of these that a rank has.
        state: has it; None for a gradient that is not reduced yet.
        weight: the divisor of a gradient; None for other values.
        key: the optimizer's name for it; "" for other values.
    """

    call: str
    loop: EngineLoop
    path: str
    roles: tuple[str, ...]
    state: State | None
    weight: Tensor | None = None
    key: str = ""

    @staticmethod
    def master(param: Tensor, call: str) -> "_Value":
        loop, path = owner_of(param, call)
        return _Value(call, loop, path, PARAMS, loop.state)

    @staticmethod
    def gradient(param: Tensor, call: str) -> "_Value":
        loop, path = owner_of(param, call)
        sums, weight = loop.summed() or (None, None)
        state = None if sums is None else tree.replace(loop.state, optimizer=sums)
        return _Value(call, loop, path, ("optimizer",), state, weight)

    @staticmethod
    def of_optimizer(param: Tensor, key: str, call: str) -> "_Value":
        loop, path = owner_of(param, call)
        name = _STATES.get(key, key)
        return _Value(call, loop, path, (f"optimizer.{name}", f"optimizer.states.{name}"), loop.state, key=key)

    def whole(self) -> Tensor | None:
        """The whole tensor; None if no rank has it. Collective."""
        if self.state is None:
            return None
        try:
            whole = gathered(self.state, self.roles, self.path)
        except KeyError:
            return None
        return whole if self.weight is None else whole.float() / self.weight

    def set_whole(self, value: Tensor) -> None:
        """Writes all of it."""
        with self._writing(value) as (state, value):
            if not written(state, self.roles, self.path, value) and self.key and not has_role(state, self.roles):
                raise KeyError(f"{self.call}: the optimizer keeps no {self.key!r}")

    def part(self) -> Tensor | None:
        """This rank's elements, in fp32; None if there is no such value."""
        local = _Local.of(self.loop, self.path, self.call)
        part = None if local is None or self.state is None else local.get(self.state, self.roles)
        return part if part is None or self.weight is None else part / self.weight

    def set_part(self, value: Tensor) -> None:
        """Writes this rank's elements."""
        local = _Local.of(self.loop, self.path, self.call)
        if local is None:
            return
        if self.key and local.get(self.loop.state, self.roles) is None:
            raise KeyError(f"{self.call}: the optimizer keeps no {self.key!r}")
        with self._writing(value) as (state, value):
            local.set(state, self.roles, value, self.call)

    @contextmanager
    def _writing(self, value: Tensor) -> Iterator[tuple[State, Tensor]]:
        if self.state is None:
            raise RuntimeError(f"{self.call}: the ranks have not summed gradients yet; call it before engine.step()")
        if self.weight is not None:
            yield self.state, value.to(self.weight.device) * self.weight
            return
        with writing(self.loop):
            yield self.state, value


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """The whole master of a parameter in fp32. Collective over the ranks."""
    loop, path = owner_of(param, "safe_get_full_fp32_param")
    return gathered(loop.state, PARAMS, path).float()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets the master of a parameter, and what the forward pass sees. All ranks pass the same value."""
    _Value.master(param, "safe_set_full_fp32_param").set_whole(value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient of a parameter for the next update, in fp32 and before clipping. Collective.

    None if there is none yet: in stages 0 and 1 ranks sum during the last backward pass of an update. Also None for a frozen
    parameter.
    """
    return _Value.gradient(param, "safe_get_full_grad").whole()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets the gradient of a parameter for the next update. All ranks pass the same value.

    Raises:
        RuntimeError: there is none yet.
    """
    _Value.gradient(param, "safe_set_full_grad").set_whole(value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A whole tensor of the optimizer's state, such as "exp_avg"; None if there is none. Collective."""
    return _Value.of_optimizer(param, optim_state_key, "safe_get_full_optimizer_state").whole()


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets a tensor of the optimizer's state. All ranks pass the same value.

    Args:
        param: whose.
        value: of the parameter's shape.
        optim_state_key: as in ``safe_get_full_optimizer_state``.

    Raises:
        KeyError: the optimizer has no such state.
    """
    _Value.of_optimizer(param, optim_state_key, "safe_set_full_optimizer_state").set_whole(value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of a stage-3 parameter's master, in fp32; None for one that is not trained.

    Raises:
        ValueError: the engine is not of stage 3, as in DeepSpeed.
    """
    return _Value.master(param, "safe_get_local_fp32_param").part()


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the master, and what the forward pass sees. Every rank calls it.

    Collective for parameters below ``param_persistence_threshold``, which stay whole on every rank.

    Raises:
        ValueError: another number of elements; as ``safe_get_local_fp32_param``.
    """
    _Value.master(param, "safe_set_local_fp32_param").set_part(value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of a tensor of the optimizer's state; None if there is none."""
    return _Value.of_optimizer(param, optim_state_key, "safe_get_local_optimizer_state").part()


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets this rank's part of a tensor of the optimizer's state.

    Args:
        param: whose.
        value: as many elements as ``safe_get_local_optimizer_state`` gives.
        optim_state_key: such as "exp_avg".

    Raises:
        KeyError: there is no such state.
        ValueError: as ``safe_set_local_fp32_param``.
    """
    _Value.of_optimizer(param, optim_state_key, "safe_set_local_optimizer_state").set_part(value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the next update's gradient, in fp32, before clipping; None if there is none yet."""
    return _Value.gradient(param, "safe_get_local_grad").part()


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's part of the next update's gradient.

    Raises:
        RuntimeError: there is none yet.
        ValueError: as ``safe_set_local_fp32_param``.
    """
    _Value.gradient(param, "safe_set_local_grad").set_part(value)


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
