"""Optimizers with DeepSpeed's constructors that update params by this library's rules."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.deepspeed.config.ds_optimizers import OPTIMIZERS, OptimizerRule
from functional_ds.deepspeed.config.keys.class_arguments import bound, sign
from functional_ds.deepspeed.config.keys.config_key import Fate
from functional_ds.optim.optimizer import Optimizer, PerParameter
from functional_ds.sharding.leaf_map import LeafMap


class NamedOptimizer(torch.optim.Optimizer):
    """A DeepSpeed optimizer, with torch's interface. A class's definition has its arguments with DeepSpeed's defaults.

    ``deepspeed.initialize`` uses its groups and their rules to update shards of params. ``step`` on its own updates each param
    by the same rule. Law: both are the rule of the config's optimizer of that name.

    Attributes:
        rule: of the config's optimizer of the same kernel.
        fixed: arguments of the rule that are the same for all groups.

    Raises:
        ValueError: an argument is unsupported.
    """

    rule: OptimizerRule
    fixed: Mapping[str, Any]

    def __init_subclass__(cls, rule: str, params: str = "params", **defaults: Any) -> None:
        super().__init_subclass__()
        sign(cls, params, defaults)
        cls.rule = next(optimizer for optimizer in OPTIMIZERS if optimizer.name == rule)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = bound(type(self), args, kwargs)
        params = next(iter(arguments.values()))
        if "adamw_mode" in arguments:
            arguments["adam_w_mode"] = arguments.pop("adamw_mode")
        vars(self).update({name: arguments[name] for name in ("adam_w_mode", "set_grad_none") if name in arguments})
        given = {key: arguments[key.name] for key in self.rule.keys if key.name in arguments}
        for key, value in given.items():
            if (key.fate is Fate.REFUSED and value) or (key.name == "fp32_optimizer_states" and not value):
                raise ValueError(f"{type(self).__name__}({key.name}=...): {key.text.removesuffix('.')}")
        numbers = {key.name: value for key, value in given.items() if key.fate is Fate.BECAME}
        self.fixed = {name: numbers.pop(name) for name in ("adam_w_mode",) if name in numbers}
        super().__init__(params, numbers)

    def rule_for(self, group: Mapping[str, Any], lr: float | None = None) -> Optimizer | PerParameter:
        """The pure optimizer for a param group.

        Args:
            group: one of ``param_groups``, with its present numbers.
            lr: instead of the group's own; a step multiplies it by the phase ``rate``.
        """
        given = {**group, **self.fixed, "lr": float(group["lr"]) if lr is None else lr}
        return self.rule.build(self.rule.arguments(given))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every param that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = self.rule_for(group)
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, rule)
        return loss

    def _move(self, p: Tensor, rule: Optimizer | PerParameter) -> None:
        if p.grad is None:
            return
        pair = rule if isinstance(rule, Optimizer) else rule.make(LeafMap.of({"p": p.detach()}))
        fresh = pair.init([torch.empty_like(p, device="meta") if self.state[p] else p.detach()])
        names = [_short(path) for path, _ in tree.named(fresh)]
        held = self.state[p] or dict(zip(names, tree.leaves(fresh), strict=True))
        state = tree.unflatten(tree.structure(fresh), [held[name] for name in names])
        weight = torch.ones((), device=p.device)
        (moved,), state = pair.update([p.detach()], Weighted([p.grad.detach().clone()], weight), state, 1.0)
        if moved.data_ptr() != p.data_ptr():
            p.detach().copy_(moved)
        self.state[p] = dict(zip(names, tree.leaves(state), strict=True))


def _short(path: str) -> str:
    """torch's name for a part of the state of one param."""
    return path.removesuffix(".0").replace("steps", "step")
