"""Param groups whose numbers may be changed between updates, as pure optimizers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.torch_private import hooks_of_optimizer
from functional_ds.base.weighted import Weighted
from functional_ds.deepspeed.config.ds_optimizers import OptimizerRule, rule_of
from functional_ds.deepspeed.config.ds_plan import ConfigPlan
from functional_ds.deepspeed.config.explain import UsageError
from functional_ds.deepspeed.config.schedules.cycled_betas import of_pairs
from functional_ds.optim.optimizer import Optimizer, PerParameter, Rate
from functional_ds.optim.param_groups import param_groups

Rule = Optimizer | PerParameter
Numbers = dict[str, Any]

_TORCH = {torch.optim.AdamW: "AdamW", torch.optim.Adam: "Adam", torch.optim.SGD: "SGD", torch.optim.Adagrad: "Adagrad"}
_ZERO = {"amsgrad": False, "maximize": False, "dampening": 0, "lr_decay": 0, "differentiable": False}


@attrs.define(eq=False)
class LiveGroup:
    """A param group: its dict, which programs read and write, and the optimizer for its numbers.

    Law: while the dict is not written, the optimizer is ``build(numbers)``.

    Attributes:
        given: the dict.
        paths: of its leaves.
        build: from its numbers and a learning rate to an optimizer.
        base: the rate to which factors are relative.
        shown: the rate that the engine has put into the dict; None if it has put none there.
    """

    given: Numbers
    paths: frozenset[str]
    build: Callable[[Numbers, float], Rule]
    base: float
    shown: float | None
    _last: tuple[Any, Rule] | None = None

    def factor(self) -> float | None:
        """The factor of the base rate, if the program has written one; else None."""
        written = float(self.given["lr"])
        return None if written == self.shown else written / self.base

    def show(self, rate: float) -> None:
        """Puts the schedule's rate into the dict, for the next update."""
        self.given["lr"] = self.shown = rate

    def rule(self) -> Rule:
        """The optimizer for the dict's present numbers."""
        numbers = {name: _plain(value) for name, value in self.given.items() if name not in ("params", "lr", "initial_lr")}
        key = repr(sorted(numbers.items()))
        if self._last is None or self._last[0] != key:
            self._last = (key, self.build(numbers, self.base))
        return self._last[1]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def live_optimizer(groups: Sequence[LiveGroup]) -> Rule:
    """The optimizer of all groups, which reads their numbers at every update."""
    rules = [_live(group) for group in groups]
    if len(rules) == 1:
        return rules[0]
    chosen: dict[Any, Rule] = {_in(group.paths): rule for group, rule in zip(groups[:-1], rules, strict=False)}
    return param_groups(chosen, rules[-1])


def _in(paths: frozenset[str]) -> Callable[[str], bool]:
    def of_group(path: str) -> bool:
        return path in paths

    return of_group


def _live(group: LiveGroup) -> Rule:
    first = group.rule()
    return of_pairs(first, partial(_asks, group), first.name)


def _asks(group: LiveGroup, pair_of: Callable[[Any], Optimizer]) -> Optimizer:
    first = group.rule()
    known: tuple[Any, Optimizer] = (first, pair_of(first))

    def update(params: list[Tensor], grads: Weighted, state: Any, rate: Rate) -> tuple[list[Tensor], Any]:
        nonlocal known
        rule, factor = group.rule(), group.factor()
        if rule is not known[0]:
            known = (rule, pair_of(rule))
        return known[1].update(params, grads, state, rate if factor is None else factor)

    return attrs.evolve(known[1], update=update)


# -- groups of a config's optimizer --------------------------------------------------------------------------------------


def as_groups(parameters: Any) -> list[Numbers]:
    """``model_parameters`` of ``initialize`` as for torch's optimizers: dicts with ``params``.

    Raises:
        TypeError: they are not tensors or dicts.
    """
    entries: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not entries or not isinstance(entries[0], Mapping):
        entries = [{"params": entries}]
    groups = []
    for group in entries:
        held = group["params"] if isinstance(group, Mapping) else None
        tensors = [held] if isinstance(held, Tensor) else [*held] if isinstance(held, Iterable) else []
        tensors = [item[1] if isinstance(item, tuple) else item for item in tensors]  # named_parameters()
        if held is None or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise TypeError(f"model_parameters: {group!r} has no tensors; pass parameters, or dicts with 'params'")
        if tensors:
            groups.append({**group, "params": tensors})
    return groups


def groups_of_config(plan: ConfigPlan, groups: Sequence[Numbers], names: Mapping[int, str]) -> list[LiveGroup]:
    """The groups of the optimizer that a config names; each dict's own numbers override the config's.

    Args:
        plan: of the config.
        groups: of ``model_parameters``.
        names: the module's parameters, by id.

    Raises:
        ValueError: a parameter is not the module's; a number is invalid.
    """
    rule = rule_of(plan.value("optimizer.type"))
    if rule is None:
        raise ValueError("config: it names no optimizer")
    config = plan.to_ds_config()["optimizer"].get("params", {})
    parsed = {key.name: key.parse(config[key.name]) for key in rule.keys if key.name in config}
    live_groups = []
    for group in groups:
        overrides = {name: value for name, value in group.items() if name not in ("params", "name", "moe")}
        unknown = overrides.keys() - {key.name for key in rule.keys} - {"initial_lr"}
        if unknown:
            raise ValueError(
                f"model_parameters: {rule.name} has no {', '.join(sorted(unknown))}; it has "
                f"{', '.join(key.name for key in rule.keys)}"
            )
        numbers = rule.arguments({**parsed, **{name: overrides[name] for name in overrides if name != "initial_lr"}})
        rate = _rate_of(rule, numbers)
        reference = rate or 1.0
        given = {**group, **{name: value for name, value in numbers.items() if value is not None}, "lr": rate}
        paths = _paths(group["params"], names)
        live_groups.append(LiveGroup(given, paths, _of_rule(rule, numbers, rate), reference, rate or None))
    _check_disjoint(live_groups)
    return live_groups


def _rate_of(rule: OptimizerRule, numbers: Numbers) -> float:
    if rule.name == "Muon":
        return float(numbers["muon_lr"] or numbers["lr"] or 0.02)
    return float(numbers["lr"])


def _of_rule(rule: OptimizerRule, numbers: Numbers, rate: float) -> Callable[[Numbers, float], Rule]:
    def build(now: Numbers, base: float) -> Rule:
        arguments = {name: now.get(name, value) for name, value in numbers.items()}
        if rule.name != "Muon" or not rate:
            arguments["lr"] = base
        betas = arguments.get("betas")
        arguments["betas"] = None if betas is None else tuple(betas)
        return rule.build(arguments)

    return build


# -- groups of an optimizer object ---------------------------------------------------------------------------------------


def groups_of_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[LiveGroup]:
    """The groups of a torch optimizer, or of one of DeepSpeed's by name; their dicts are the optimizer's own.

    Raises:
        ValueError: it, or one of its options, has no pure form; a parameter is not the module's.
        UsageError: it has made updates, or has hooks.
    """
    build, class_name = _builder(optimizer), type(optimizer).__name__
    if any(x is not None for held in optimizer.state.values() if float(held.get("step", 1)) for x in held.values()):
        raise UsageError(
            f"optimizer: this {class_name} has made updates, and the engine begins with moments of zero; pass a new one, and "
            "resume with engine.load_checkpoint, or set moments by safe_set_full_optimizer_state"
        )
    if hooks_of_optimizer(optimizer):
        raise UsageError(
            f"optimizer: this {class_name} has hooks, and the engine never calls its step(); call them around engine.step()"
        )
    live_groups = []
    for group in optimizer.param_groups:
        if group["params"]:
            base = float(group.get("initial_lr", group["lr"])) or 1.0
            live_groups.append(LiveGroup(group, _paths(group["params"], names), build, base, None))
            live_groups[-1].rule()  # refuses options
    _check_disjoint(live_groups)
    return live_groups


def _builder(optimizer: torch.optim.Optimizer) -> Callable[[Numbers, float], Rule]:
    named = getattr(optimizer, "rule_for", None)
    if named is not None:
        return lambda numbers, lr: named({**numbers, "lr": lr}, lr)
    cls = type(optimizer)
    name = _TORCH.get(cls)
    rule = None if name is None else rule_of(name)
    if rule is None:
        raise UsageError(
            f"optimizer: {cls.__module__}.{cls.__qualname__} has no pure form here, which updates of shards need. There are "
            "torch.optim's AdamW, Adam, SGD and Adagrad, DeepSpeed's in functional_ds.deepspeed.ops, and those that a config "
            "names ('optimizer': {'type': ...}); any other rule can be an fds.Optimizer in a step of your own"
        )

    def build(numbers: Numbers, lr: float) -> Rule:
        for option, harmless in _ZERO.items():
            if numbers.get(option, harmless) != harmless:
                raise ValueError(f"optimizer: {cls.__name__}({option}={numbers[option]}) has no pure form here; leave it out")
        decoupled = name == "AdamW" or numbers.get("decoupled_weight_decay", False)
        return rule.build(rule.arguments({**numbers, "lr": lr, "adam_w_mode": decoupled, "betas": _pair(numbers)}))

    return build


def _pair(numbers: Numbers) -> tuple[float, ...] | None:
    return tuple(map(float, numbers["betas"])) if "betas" in numbers else None


def _paths(parameters: Iterable[nn.Parameter], names: Mapping[int, str]) -> frozenset[str]:
    paths = []
    for parameter in parameters:
        if id(parameter) not in names:
            raise ValueError(
                f"optimizer: a parameter of shape {list(parameter.shape)} is not one of the model's. Make the optimizer after "
                "the model has its final parameters, from the model that you pass"
            )
        paths.append(names[id(parameter)])
    return frozenset(paths)


def _check_disjoint(groups: Sequence[LiveGroup]) -> None:
    seen: set[str] = set()
    for group in groups:
        if twice := seen & group.paths:
            raise UsageError(f"optimizer: {sorted(twice)[0]!r} is in two param groups")
        seen |= group.paths
