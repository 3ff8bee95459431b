"""The user's own module as a view of a step's state: its parameters and buffers show the state's."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.torch_private import FakeTensor
from functional_ds.modules.functional import Apply
from functional_ds.state_dict.leaf_places import StateLayout
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .zero_init import ZeroParamStatus


@attrs.frozen(eq=False)
class _LiveParameters:
    """Where a parameter's values are in a stored tensor."""

    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    name: str


@attrs.define(eq=False)
class LiveModule:
    """A module whose parameters are views of what a state stores, so that reading them costs nothing and no memory.

    Stages 0 to 2 store whole params. In stage 3 a parameter is empty, as DeepSpeed's are, and ``gather`` functions fill it.

    Attributes:
        module: the user's.
        apply: the same as a function.
        params: the module's parameters, by the names of ``fds.functional``.
        shows: whether the state stores whole params.
    """

    module: nn.Module
    apply: Apply
    params: Mapping[str, nn.Parameter]
    shows: bool
    _views: list[list[_LiveParameters]] | None = None
    _seen: list[Any] = attrs.field(factory=list)  # the stored tensors that the parameters are views of
    _shown: dict[str, Tensor] = attrs.field(factory=dict)  # what each whole parameter shows
    _held: list[tuple[int, torch.dtype]] = attrs.field(factory=list)  # where each parameter's values are
    _homes: dict[str, tuple[dict[str, Any], str]] = attrs.field(init=False)  # where the module has each
    _owners: list[nn.Module] = attrs.field(init=False)
    _bare: list[nn.Module] = attrs.field(init=False)
    _modes: list[bool] = attrs.field(init=False)
    _trains: list[bool] = attrs.field(init=False)
    _own_buffers: dict[str, tuple[dict[str, Any], str]] = attrs.field(init=False)
    _empty: dict[torch.dtype, Tensor] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._owners, self._bare = [*self.module.modules()], [*self.apply.module.modules()]
        self._modes = [module.training for module in self._owners]
        self._trains = [parameter.requires_grad for parameter in self.params.values()]
        self._own_buffers, self._homes = (
            {
                f"{path}.{key}" if path else key: (held, key)
                for path, owner in self.module.named_modules()
                for held in (owner.__dict__[registry],)
                for key in held
            }
            for registry in ("_buffers", "_parameters")
        )

    def follow_modes(self) -> None:
        """Copies the user's module's modes to the function."""
        modes = [owner.training for owner in self._owners]
        if modes != self._modes:
            for bare, mode in zip(self._bare, modes, strict=True):
                if bare.training != mode:
                    bare.training = mode
            self._modes = modes

    def follow_values(self, rest: Callable[[], None]) -> None:
        """Writes tensors that the program has assigned: ``parameter.data = x`` is ``parameter.data.copy_(x)``.

        Args:
            rest: called before a write.

        Raises:
            RuntimeError: another shape, dtype or device, another parameter, or one whose values are sharded.
        """
        homes = (self._homes[name] for name in self.params)
        replaced = any(
            held.get(key) is not parameter for (held, key), parameter in zip(homes, self.params.values(), strict=True)
        )
        if not replaced and self._kinds() == self._held:
            return
        for (name, parameter), (_, dtype) in zip(self.params.items(), self._held, strict=True):
            (held, key), shown = self._homes[name], self._shown.get(name)
            if held.get(key) is not parameter:
                raise RuntimeError(
                    f"{name!r} of engine.module is not the parameter that it was at initialize, which the step trains; write "
                    "into that: parameter.data.copy_(value)"
                )
            if shown is None and parameter.numel() and getattr(parameter, "ds_status", None) is not ZeroParamStatus.AVAILABLE:
                raise RuntimeError(
                    f"{name!r} was assigned a value, and its values are in shards; assign it within "
                    "zero.GatheredParameters(parameter, modifier_rank=0)"
                )
            like = parameter if shown is None else shown
            if (parameter.shape, parameter.dtype, parameter.device) != (like.shape, dtype, like.device):
                raise RuntimeError(
                    f"{name!r} of engine.module is now {parameter.dtype} of shape {list(parameter.shape)} on "
                    f"{parameter.device}, and the step has {dtype} of shape {list(like.shape)} on {like.device}; change "
                    "shapes, dtypes and devices before initialize, or the dtype by bf16 or fp16 in the config"
                )
            if shown is not None and parameter.data_ptr() != shown.data_ptr():
                rest()
                parameter.data = shown.copy_(parameter.detach())

    def _kinds(self) -> list[tuple[int, torch.dtype]]:
        return [(parameter.data_ptr(), parameter.dtype) for parameter in self.params.values()]

    def call(self, params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """The module's output; parameters that the user's module has frozen meanwhile get no gradient.

        Raises:
            RuntimeError: one that was frozen at ``initialize`` requires a gradient now.
        """
        if [parameter.requires_grad for parameter in self.params.values()] != self._trains:
            for (name, parameter), trained in zip(self.params.items(), self._trains, strict=True):
                if parameter.requires_grad and not trained:
                    raise RuntimeError(
                        f"{name!r} was frozen at initialize and requires a gradient now, but it has no optimizer state: call "
                        "initialize with it trained, and freeze it by requires_grad_(False) until it is to move"
                    )
            params = {name: x if self.params[name].requires_grad else x.detach() for name, x in params.items()}
        return self.apply(params, *args, **kwargs)

    def show(self, step: Step, state: State) -> None:
        """Makes parameters and buffers those of the state."""
        if self.shows:
            stored = tree.leaves(state.params)
            if self._views is None:
                self._views, self._seen = self._places(state), [None] * len(stored)
            for index, (tensor, views) in enumerate(zip(stored, self._views, strict=True)):
                if tensor.data_ptr() != self._seen[index]:
                    flat = tensor.detach().view(-1)
                    begin = flat.storage_offset()
                    for view in views:
                        shown = self._shown[view.name] = flat.as_strided(view.shape, view.stride, begin + view.start)
                        self.params[view.name].data = shown
                    self._seen[index] = tensor.data_ptr()
        elif self._views is None:
            self._views = []
            frame = StateLayout.of(state).stored
            for tensor, place in zip(tree.leaves(state.params), frame.places, strict=True):
                for member in place.members:
                    self.clear(self.params[frame.leaves[member][0]], tensor.dtype)
        self._held = self._kinds()
        if self._own_buffers:
            for name, buffer in _flat(step.module_buffers(state)):
                if name in self._own_buffers:
                    held, key = self._own_buffers[name]
                    if held[key] is not buffer:
                        held[key] = buffer

    def clear(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> None:
        """Makes a parameter empty, in its dtype or another."""
        dtype = dtype or parameter.dtype
        if dtype not in self._empty:
            self._empty[dtype] = torch.empty(0, dtype=dtype, device=parameter.device)
        parameter.data = self._empty[dtype]

    def clear_others(self, state: State) -> None:
        """Empties the parameters that this rank's state does not have: those of other stages."""
        frame = StateLayout.of(state).stored
        names = {frame.leaves[member][0] for place in frame.places for member in place.members}
        for name, parameter in self.params.items():
            if name not in names:
                self.clear(parameter)
        self._held = self._kinds()

    def _places(self, state: State) -> list[list[_LiveParameters]]:
        frame = StateLayout.of(state).stored
        places: list[list[_LiveParameters]] = []
        for tensor, place in zip(tree.leaves(state.params), frame.places, strict=True):
            form = place.form_of(tensor)
            cuts = () if form is None else form[0].cuts
            rows = []
            for cut in cuts:
                name = frame.leaves[cut.leaf][0]
                shape = self.params[name].shape
                stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
                rows.append(_LiveParameters(cut.start, shape, stride, name))
            places.append(rows)
        return places

    def whole(self, step: Step, state: State, *, frozen: bool) -> dict[str, Tensor]:
        """The module's ``state_dict`` on the host, with whole params in the forward pass's dtype. Collective in stage 3.

        Args:
            step: the step.
            state: its state.
            frozen: whether to include params that are not trained.
        """
        dtypes = {name: parameter.dtype for name, parameter in self.params.items()}
        leaves: dict[str, Tensor] = {} if self.shows else step.params(state)
        values = {id(self.params[name]): leaf.detach().to("cpu", dtypes[name]) for name, leaf in leaves.items()}
        named = self.module.named_parameters(remove_duplicate=False)
        frozen_names = {name for name, parameter in named if not parameter.requires_grad}
        state_dict = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if (frozen or name not in frozen_names) and isinstance(value, Tensor):
                state_dict[name] = values[id(value)] if id(value) in values else value.detach().cpu().clone()
        return state_dict


def take_over(holders: Mapping[str, Sequence[int]], module: nn.Module) -> None:
    """Gives a module's params and buffers the values of the first rank that has them. Those without values are left alone.

    Args:
        holders: by name, the ranks that have a param; all have the others, and buffers.
        module: the same on all ranks.
    """
    here = comm.world()
    if here.size == 1:
        return
    everyone, held = tuple(range(here.size)), dict[tuple[int, ...], list[Tensor]]()
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if not isinstance(x, FakeTensor):
            held.setdefault(tuple(holders.get(name, everyone)), []).append(x)
    for ranks, tensors in sorted(held.items()):  # in one order on all ranks, or they would wait for each other
        if here.rank in ranks and len(ranks) > 1:
            group = here if ranks == everyone else comm.new_group([here.ranks[rank] for rank in ranks], "holders")
            for mine, first in zip(tensors, comm.broadcast([x.detach() for x in tensors], group=group), strict=True):
                mine.data.copy_(first)


def _flat(buffers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Buffers by name; of several modules, those of all."""
    for name, value in buffers.items():
        if isinstance(value, Mapping):
            yield from value.items()
        else:
            yield name, value
