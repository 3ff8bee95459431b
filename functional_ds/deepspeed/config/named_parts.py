"""The optimizer and the scheduler that a DeepSpeed config names."""

import difflib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from functional_ds.sharding.path_patterns import nearest

from .config_reader import ABSENT, Settings
from .ds_optimizers import OPTIMIZERS, OptimizerRule, muon_rates, rule_of
from .keys.config_key import ConfigKey, Fate
from .keys.config_table import NOT_HERE
from .schedules.ds_schedules import SCHEDULERS, beta_cycle
from .schedules.lr_scheduler import RateSchedule
from .schedules.torch_schedules import TorchRates, why_not

# Schedulers whose rates are multiples of each param group's own.
_MULTIPLES = ("WarmupCosineLR", "StepLR", "MultiStepLR", "ExponentialLR", "ConstantLR", "LinearLR", "PolynomialLR")
_COSINES = ("CosineAnnealingLR", "CosineAnnealingWarmRestarts")  # without a floor they are, too


def optimizer_of(s: Settings) -> tuple[OptimizerRule | None, dict[str, Any]]:
    """The rule and its arguments; None if the config names no optimizer, or an unsupported one."""
    name = s["optimizer.type"]
    if name is None:
        if "optimizer.params" in s:
            s.note("optimizer.params", Fate.IGNORED, "DeepSpeed reads it only with `optimizer.type`.")
        return None, {}
    rule = rule_of(name)
    if rule is None:
        s.refuse("optimizer.type", _unknown_optimizer(name))
        return None, {}
    s.note("optimizer.type", Fate.BECAME, rule.text)
    arguments = rule.arguments(_parameters(s, "optimizer.params", rule.keys))
    if rule.name == "Adam" and arguments["adam_w_mode"]:
        s.note("optimizer.type", Fate.BECAME, '`fds.adamw`: "Adam" means AdamW in DeepSpeed, unless `adam_w_mode` is false.')
    if rule.reduces and s["zero_optimization.stage"]:
        s.refuse("zero_optimization.stage", f"{rule.name} compresses whole tensors; it is for stage 0")
    return rule, arguments


def _unknown_optimizer(name: str) -> str:
    reason = NOT_HERE["optimizers"].get(name.lower())
    if reason:
        return reason
    known = [rule.name for rule in OPTIMIZERS]
    if isinstance(getattr(torch.optim, name, None), type):
        return (
            f"torch.optim.{name} has no pure form here; use one of {', '.join(known)}, or give `fds.train_step` your own pair"
        )
    return f"DeepSpeed has no such optimizer, and torch.optim neither (names of torch's are exact); {nearest(name, known)}"


def schedule_of(
    s: Settings, rule: OptimizerRule | None, arguments: dict[str, Any], lr: float | None
) -> tuple[RateSchedule | None, dict[str, Any]]:
    """The schedule, and the optimizer's arguments with the learning rate to which its factors are relative."""
    name = s["scheduler.type"]
    if name is None:
        if "scheduler.params" in s:
            s.note("scheduler.params", Fate.IGNORED, "DeepSpeed reads it only with `scheduler.type`.")
        return None, arguments
    if rule is None and lr is None:
        if s["optimizer.type"] is None:
            s.refuse("scheduler.type", "the config has no optimizer; pass its learning rate: from_ds_config(..., lr=...)")
        return None, arguments
    base, arguments = _base_rate(s, name, rule, arguments, lr)
    reference = base or 1.0
    if name not in SCHEDULERS:
        return _torch_schedule(s, name, base, reference), arguments
    scheduler = SCHEDULERS[name]
    given = _parameters(s, "scheduler.params", scheduler.keys)
    missing = [
        argument
        for argument in scheduler.required
        if given.get(argument) is None and f"scheduler.params.{argument}" not in s.rows
    ]
    if missing:
        s.refuse("scheduler.type", f"{name} needs {' and '.join(missing)} in scheduler.params")
    if any(s.rows[path].fate is Fate.REFUSED for path in s.rows if path.startswith("scheduler.")):
        return None, arguments
    s.note("scheduler.type", Fate.BECAME, "`plan.schedule`: update k has the rate of DeepSpeed's iteration k - 1.")
    if name == "OneCycle" and given.get("cycle_momentum", True) and (rule is None or rule.betas):
        if rule is None or rule.reduces:
            what = "an optimizer that is not part of the config" if rule is None else rule.name
            s.refuse("scheduler.params.cycle_momentum", f"the betas of {what} cannot cycle here; set it to false")
            return None, arguments
        arguments = {**arguments, "betas": beta_cycle(given)}
    return scheduler.build(given, base, reference), arguments


def _base_rate(
    s: Settings, name: str, rule: OptimizerRule | None, arguments: dict[str, Any], lr: float | None
) -> tuple[float, dict[str, Any]]:
    """The optimizer's own learning rate; 0 is replaced by 1 in the arguments, because factors are relative to it."""
    if rule is None:
        return lr or 0.0, arguments
    if rule.name != "Muon":
        return arguments["lr"], {**arguments, "lr": arguments["lr"] or 1.0}
    rates = muon_rates(arguments)
    multiples = name in _MULTIPLES or (name in _COSINES and not (s["scheduler.params"] or {}).get("eta_min"))
    if rates[0] != rates[1] and not multiples:
        s.refuse("scheduler.type", f"{name} sets one rate, and muon_lr={rates[0]} and adam_lr={rates[1]} differ; give one lr")
    base = rates[0] or rates[1]
    given = rates if base else (1.0, 1.0)
    return base, {**arguments, "muon_lr": given[0], "adam_lr": given[1]}


def _torch_schedule(s: Settings, name: str, base: float, reference: float) -> RateSchedule | None:
    params = s["scheduler.params"] or {}
    reason = why_not(name, params)
    if reason is None:
        numbers = {argument: _number(value) for argument, value in params.items()}
        try:
            rates = TorchRates(name, numbers, base)
            rates(torch.tensor(1))  # some check their arguments only when they step
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"torch.optim.lr_scheduler.{name}: {error}"
    if reason is not None:
        close = difflib.get_close_matches(name, list(SCHEDULERS), 1, 0.0)[0]
        s.refuse("scheduler.type", reason.replace("{nearest!r}", repr(close)))
        return None
    s.note(
        "scheduler.type", Fate.BECAME, f"torch.optim.lr_scheduler.{name}, run on the host: each update reads the count back."
    )
    s.note("scheduler.params", Fate.BECAME, "The scheduler's arguments.")
    return RateSchedule(f"{name}({params})", rates, reference, lambda rate: TorchRates(name, numbers, rate))


def _number(value: Any) -> Any:
    """A string that is a number as one."""
    with suppress(TypeError, ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def _parameters(s: Settings, block: str, keys: Sequence[ConfigKey]) -> dict[str, Any]:
    """The config's arguments, parsed; each is a row of the explanation."""
    known = {key.name: key for key in keys}
    parsed: dict[str, Any] = {}
    for name, value in (s[block] or {}).items():
        path = f"{block}.{name}"
        s.spelled[path], s.given[path] = path, value
        if name not in known:
            s.refuse(path, f"there is no such argument; {nearest(name, known)}")
            continue
        key = known[name]
        s.put(key, path, ABSENT if value == "auto" else value)
        if path in s and key.fate is not Fate.REFUSED:
            s.note(path, key.fate, key.reason(s[path]))
        if path in s:
            parsed[name] = s[path]
    s.rows.pop(s.spelled.get(block, block), None)
    s.given.pop(block, None)
    return parsed
