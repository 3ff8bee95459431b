"""``zero.GatheredParameters``, and which engine has a parameter."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base.torch_private import FakeTensor
from functional_ds.deepspeed.config.ds_plan import ConfigPlan

from .engine_loop import EngineLoop
from .leaf_values import PARAMS, gathered, written
from .zero_init import ZeroParamStatus, broadcast_deferred, mark_sharded

_OWNER = "_fds_owner"


@attrs.frozen(eq=False)
class _Owner:
    loop: "weakref.ref[EngineLoop]"
    path: str


def owner_of(parameter: Tensor, what: str) -> tuple[EngineLoop, str]:
    """The engine's loop that has a parameter, and the parameter's name.

    Raises:
        ValueError: no engine has it.
    """
    owner: _Owner | None = getattr(parameter, _OWNER, None)
    loop = None if owner is None else owner.loop()
    if owner is None or loop is None:
        raise ValueError(f"{what}: a parameter of shape {list(parameter.shape)} is of no engine; call initialize first")
    return loop, owner.path


def own_parameters(loop: EngineLoop, parameters: Mapping[str, nn.Parameter], plan: ConfigPlan) -> None:
    """Marks an engine's parameters; those of stage 3 also as DeepSpeed's are: ``ds_id``, ``ds_shape``, ``ds_persist``."""
    small, remaining = (plan.value(f"zero_optimization.{name}_persistence_threshold") for name in ("param", "model"))
    if plan.value("zero_optimization.offload_param.device") != "none":
        small = -1  # no param stays on the device then
    shapes = {name: bare.shape for name, bare in loop.live.apply.bare.items()}
    for number, (name, parameter) in enumerate(parameters.items()):
        held: Any = parameter
        setattr(held, _OWNER, _Owner(weakref.ref(loop), name))
        for mark in [attribute for attribute in vars(held) if attribute.startswith("ds_")]:
            delattr(held, mark)  # of zero.Init
        if not loop.live.shows:
            mark_sharded(held, number, shapes[name])
            held.ds_persist = held.ds_numel <= min(small, remaining)
            remaining -= held.ds_numel * held.ds_persist


def fill_again(module: nn.Module) -> None:
    """Gives parameters that an engine of stage 3 has emptied their values, for another engine. Collective."""
    for parameter in module.parameters():
        if hasattr(parameter, _OWNER) and getattr(parameter, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE:
            _fill(parameter, "initialize")


def _fill(parameter: Any, what: str) -> tuple[EngineLoop, str]:
    """Gives a parameter its whole values; its engine's loop and its path."""
    loop, path = owner_of(parameter, what)
    parameter.data = gathered(loop.state, ("params",), path).to(parameter.dtype)
    parameter.ds_status = ZeroParamStatus.AVAILABLE
    return loop, path


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """A context in which stage-3 parameters have their values. Collective. In other stages they always have.

    Before ``initialize``, parameters that ``zero.Init`` has made get those of ``modifier_rank``.

    Args:
        params: a parameter or several, or a module.
        modifier_rank: the rank whose values are kept after the block; None if the block only reads.
        fwd_module: has no effect.
        enabled: False does nothing.

    Raises:
        ValueError: values of another shape; there is no such rank.

    Cost: an all-gather of each parameter, and a broadcast of each with ``modifier_rank``.
    """
    del fwd_module
    if modifier_rank is not None and not 0 <= modifier_rank < comm.world().size:
        raise ValueError(
            f"GatheredParameters: modifier_rank={modifier_rank}, and there are {comm.world().size} ranks from 0 on"
        )
    given = params.parameters() if isinstance(params, nn.Module) else [params] if isinstance(params, Tensor) else params
    given = [*given] if enabled else []
    held: list[Any] = [p for p in given if hasattr(p, "ds_id") and hasattr(p, _OWNER)]
    held = [p for p in dict.fromkeys(held) if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]
    filled = [(p, *_fill(p, "GatheredParameters")) for p in held]
    try:
        yield
        if modifier_rank is not None:
            for parameter, loop, path in filled:
                with writing(loop):
                    written(loop.state, PARAMS, path, comm.broadcast(parameter.detach(), modifier_rank))
            for parameter in given:
                if isinstance(parameter, FakeTensor):
                    broadcast_deferred(parameter, modifier_rank)
    finally:
        for parameter, loop, _ in filled:
            loop.live.clear(parameter)
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE


@contextmanager
def writing(loop: EngineLoop) -> Iterator[None]:
    """A context for writes into a loop's state; the module shows the result."""
    loop.rest()
    yield
    loop.live.show(loop.step, loop.state)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a parameter is gathered wherever it is used."""
    del module, parameter
