"""DeepSpeed's optimizers by name: their arguments (in ``keys.toml``), and what they build. In DeepSpeed "Adam" means AdamW."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from functional_ds.optim.adagrad import adagrad
from functional_ds.optim.adam import adam, adamw
from functional_ds.optim.lamb import lamb
from functional_ds.optim.lion import lion
from functional_ds.optim.matrix.muon import muon
from functional_ds.optim.one_bit import one_bit_adam, zero_one_adam
from functional_ds.optim.optimizer import Optimizer, PerParameter
from functional_ds.optim.sgd import sgd

from .keys import config_table
from .keys.config_key import ConfigKey
from .schedules.cycled_betas import cycled

Built = Optimizer | PerParameter


@attrs.frozen
class OptimizerRule:
    """One optimizer: its arguments, and what they build.

    Attributes:
        name: DeepSpeed's name; case-insensitive, or exact if DeepSpeed looks it up in torch.
        keys: its arguments.
        build: from all arguments to an optimizer.
        exact: whether the name is case-sensitive.
        betas: whether it has betas, which OneCycle would cycle.
        reduces: whether it sums gradients over the ranks itself.
        text: what it becomes.
    """

    name: str
    keys: tuple[ConfigKey, ...]
    build: Callable[[dict[str, Any]], Built]
    text: str
    exact: bool = False
    betas: bool = True
    reduces: bool = False

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """All arguments, including DeepSpeed's defaults."""
        return {key.name: given.get(key.name, key.default) for key in self.keys}

    def built(self, arguments: dict[str, Any]) -> Built:
        """The optimizer for all arguments, whose betas may be a function of the updates."""
        betas = arguments.get("betas")
        if not callable(betas):
            return self.build(arguments)
        return cycled(lambda pair: self.build({**arguments, "betas": pair}), betas)


def rule_of(name: str) -> OptimizerRule | None:
    """The rule for a name, by DeepSpeed's lookup."""
    for rule in OPTIMIZERS:
        if rule.name == name or (not rule.exact and rule.name.lower() == name.lower()):
            return rule
    return None


def _moments(a: dict[str, Any]) -> dict[str, Any]:
    return {name: a[name] for name in ("betas", "eps", "weight_decay")}


def _adam(a: dict[str, Any], *, decoupled: bool) -> Built:
    decays = decoupled or a["adam_w_mode"]
    decay = a["weight_decay"]
    if decay is None:
        decay = 0.01 if a["torch_adam"] and decays else 0.0
    rule = adamw if decays else adam
    return rule(a["lr"], **_moments(a | {"weight_decay": decay}), bias_correction=a["bias_correction"])


def muon_rates(a: dict[str, Any]) -> tuple[float, float]:
    """The learning rates of Muon's matrices and of other params; 0 is a valid rate."""
    choices = (a["muon_lr"], a["lr"], 0.02), (a["adam_lr"], a["lr"], 3e-4)
    matrices, rest = (next(rate for rate in rates if rate is not None) for rates in choices)
    return matrices, rest


def _is_matrix(path: str) -> bool:
    """Whether Muon applies: DeepSpeed uses Adam for names with these words; a model may have no other params."""
    return not any(word in path.lower() for word in ("embed", "lm_head"))


def _muon(a: dict[str, Any]) -> Built:
    lr, rate = muon_rates(a)
    others = adamw if a["adam_w_mode"] else adam
    aside = others(rate, **_moments(a))
    return muon(lr, aside, momentum=a["momentum"], weight_decay=a["weight_decay"], matrices=_is_matrix)


def _lamb(a: dict[str, Any]) -> Built:
    trust = (a["min_coeff"], a["max_coeff"])
    correction = "rate" if a["bias_correction"] else None
    return lamb(a["lr"], trust=trust, correction=correction, **_moments(a))  # type: ignore[arg-type]


def _zero_one(a: dict[str, Any]) -> Built:
    longest = a["local_step_clipper"]
    local = max(1, a["local_step_scaler"] // longest) * longest
    freeze, update_scaler = a["var_freeze_step"], a["var_update_scaler"]
    return zero_one_adam(a["lr"], freeze=freeze, each=update_scaler, local=local, longest=longest, **_moments(a))


_BUILD: dict[str, Callable[[dict[str, Any]], Built]] = {
    "Adam": partial(_adam, decoupled=False),
    "AdamW": partial(_adam, decoupled=True),
    "Adagrad": lambda a: adagrad(a["lr"], initial=a["initial_accumulator_value"], eps=a["eps"], weight_decay=a["weight_decay"]),
    "Lamb": _lamb,
    "Lion": lambda a: lion(a["lr"], betas=a["betas"], weight_decay=a["weight_decay"]),
    "Muon": _muon,
    "SGD": lambda a: sgd(a["lr"], momentum=a["momentum"], nesterov=a["nesterov"], weight_decay=a["weight_decay"]),
    "OneBitAdam": lambda a: one_bit_adam(a["lr"], warmup=a["freeze_step"], **_moments(a)),
    "ZeroOneAdam": _zero_one,
}

OPTIMIZERS: tuple[OptimizerRule, ...] = tuple(
    OptimizerRule(
        row["name"],
        config_table.optimizer_keys(row),
        _BUILD[row["name"]],
        row["text"],
        **{fact: row[fact] for fact in ("exact", "betas", "reduces") if fact in row},
    )
    for row in config_table.OPTIMIZERS
)
