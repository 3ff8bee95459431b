"""``deepspeed.moe.utils``: which params are experts', and param groups that separate them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from functional_ds import comm
from functional_ds.deepspeed.utils.groups import expert_data_ranks

from .layer import MoE

__all__ = [
    "configure_moe_param_groups",
    "expert_sharers",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]

ParamGroup = dict[str, Any]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a module has a layer of experts, and how many experts the first one has."""
    count = next((module.num_experts for module in m.modules() if isinstance(module, MoE)), None)
    return count is not None, count or 0


def is_moe_param(param: Tensor) -> bool:
    """Whether it is an expert's."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether its params are experts'."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The params that all ranks share, and the experts'."""
    held = list(params)
    return [p for p in held if not is_moe_param(p)], [p for p in held if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: ParamGroup | tuple[ParamGroup, ...] | list[ParamGroup], max_group_size: float | None = 178956971
) -> list[ParamGroup]:
    """Moves the experts' params from the groups to new groups that follow them.

    Args:
        param_groups: each with a ``name``; their list of params is changed, as in DeepSpeed.
        max_group_size: the most elements of a new group; None for no limit.
    """
    given = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    apart: list[ParamGroup] = []
    for group in given:
        experts: dict[str, list[Tensor]] = {}
        for param in group["params"]:
            if is_moe_param(param):
                experts.setdefault(param.group_name, []).append(param)
        for name, params in sorted(experts.items()):
            parts = [params] if max_group_size is None else _parts(params, max_group_size)
            apart += [{**group, "name": name, "moe": True, "params": part} for part in parts]
        group["params"] = [param for param in group["params"] if not is_moe_param(param)]
    return [*given, *apart]


def _parts(params: list[Tensor], limit: float) -> list[list[Tensor]]:
    parts: list[list[Tensor]] = []
    size = math.inf
    for param in params:
        if size + param.numel() > limit:
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += param.numel()
    return parts


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Param groups with experts' params separated, from params or groups."""
    if not model_parameters:
        raise ValueError("model_parameters is empty: params, or param groups")
    if not isinstance(model_parameters[0], dict):
        group = {"params": model_parameters, "name": "dense-params"}
        return split_params_into_different_moe_groups_for_optimizer(group)
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


def expert_sharers(module: nn.Module) -> dict[str, tuple[tuple[int, ...], ...]]:
    """By name, the experts' params that not all ranks have: the blocks of ranks that share one (``base.marks.mark_sharers``).

    >>> layer = MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2)
    >>> comm.simulate(lambda: expert_sharers(layer)["deepspeed_moe.experts.deepspeed_experts.0.bias"], world_size=4)[0]
    ((0, 2), (1, 3))
    """
    world, sharers = comm.world().size, dict[str, tuple[tuple[int, ...], ...]]()
    for name, layer in module.named_modules():
        if isinstance(layer, MoE) and layer.ep_size > 1:
            blocks = tuple(tuple(expert_data_ranks(layer.ep_size, first, world)) for first in range(layer.ep_size))
            prefix = f"{name}." if name else ""
            for inner, _ in layer.deepspeed_moe.experts.named_parameters():
                sharers[f"{prefix}deepspeed_moe.experts.{inner}"] = blocks
    return sharers
