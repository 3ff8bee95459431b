"""Optimizers that are made with DeepSpeed's arguments and move params by this library's rules."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.deepspeed.config.ds_optimizers import rule_of
from functional_ds.optim.optimizer import Optimizer, PerParameter
from functional_ds.sharding.leaf_map import LeafMap

__all__ = ["NamedOptimizer", "refuse_option"]


def refuse_option(kind: str, name: str, why: str) -> None:
    """Raises ValueError for an argument that has no meaning here."""
    raise ValueError(f"{kind}({name}=...): {why}")


class NamedOptimizer(torch.optim.Optimizer):
    """An optimizer of DeepSpeed's, with torch's interface.

    ``deepspeed.initialize`` takes its groups and their rules, and updates shards of params by these. By itself ``step`` moves
    each param by the same rule. The law: both are the rule of the config's optimizer of that name.

    Attributes:
        rule_name: the name of its rule among the config's optimizers.
        fixed: arguments of the rule that are the same for all groups.
    """

    rule_name: str
    fixed: Mapping[str, Any]

    def rule_for(self, group: Mapping[str, Any], lr: float | None = None) -> Optimizer | PerParameter:
        """The pure optimizer for a param group.

        Args:
            group: one of ``param_groups``, with its numbers as they are now.
            lr: instead of the group's own; a step multiplies it by the phase ``rate``.
        """
        rule = rule_of(self.rule_name)
        if rule is None:
            raise ValueError(f"{self.rule_name}: there is no such rule")
        given = {**group, **self.fixed, "lr": float(group["lr"]) if lr is None else lr}
        return rule.build(rule.arguments(given))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves every param that has a gradient."""
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
