"""DeepSpeed's optimizers by name, with DeepSpeed's defaults: "Adam" means AdamW there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from functional_ds.optim.adagrad import adagrad
from functional_ds.optim.adam import adam, adamw
from functional_ds.optim.lamb import lamb
from functional_ds.optim.lion import lion
from functional_ds.optim.muon import muon
from functional_ds.optim.one_bit import one_bit_adam, zero_one_adam
from functional_ds.optim.optimizer import Optimizer, PerParameter
from functional_ds.optim.sgd import sgd

from .keys.config_key import ConfigKey, became, ignored, refused
from .schedules.cycled_betas import cycled

__all__ = ["OPTIMIZERS", "OptimizerRule", "muon_rates", "rule_of"]

Built = Optimizer | PerParameter


@attrs.frozen
class OptimizerRule:
    """One optimizer: its arguments, and what they build.

    Attributes:
        name: DeepSpeed's name; it is read without regard to case, or exactly where DeepSpeed asks torch for it.
        keys: its arguments.
        build: from all arguments to an optimizer.
        exact: whether the name's case counts.
        betas: whether it has betas, which OneCycle would cycle.
        reduces: whether it sums gradients over the ranks itself.
        text: what becomes of it.
    """

    name: str
    keys: tuple[ConfigKey, ...]
    build: Callable[[dict[str, Any]], Built]
    text: str
    exact: bool = False
    betas: bool = True
    reduces: bool = False

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """All arguments, DeepSpeed's defaults among them."""
        return {key.name: given.get(key.name, key.default) for key in self.keys}

    def built(self, arguments: dict[str, Any]) -> Built:
        """The optimizer of all arguments, whose betas may be a function of the updates."""
        betas = arguments.get("betas")
        if not callable(betas):
            return self.build(arguments)
        return cycled(lambda pair: self.build({**arguments, "betas": pair}), betas)


def rule_of(name: str) -> OptimizerRule | None:
    """The rule of a name, as DeepSpeed finds it."""
    for rule in OPTIMIZERS:
        if rule.name == name or (not rule.exact and rule.name.lower() == name.lower()):
            return rule
    return None


def _key(name: str, kind: Any, default: Any, text: str, **more: Any) -> ConfigKey:
    return became(f"optimizer.params.{name}", kind, default, text, **more)


def _off(name: str, kind: Any, default: Any, text: str, **more: Any) -> ConfigKey:
    return refused(f"optimizer.params.{name}", kind, default, text, **more)


def _nothing(name: str, kind: Any, default: Any, text: str = "It chooses among kernels.") -> ConfigKey:
    return ignored(f"optimizer.params.{name}", kind, default, text)


def _lr(default: float) -> ConfigKey:
    return _key("lr", "float", default, "`lr=`", least=0)


def _decay(default: float | None = 0.0, text: str = "`weight_decay=`") -> ConfigKey:
    return _key("weight_decay", "float", default, text, least=0)


def _eps(default: float) -> ConfigKey:
    return _key("eps", "float", default, "`eps=`", least=0)


_BETAS = _key("betas", "betas", (0.9, 0.999), "`betas=`")
_CLIP = _off("max_grad_norm", "float", 0.0, "DeepSpeed refuses it too: use `gradient_clipping`.")
_AMSGRAD = _off("amsgrad", "bool", False, "DeepSpeed's kernels have no AMSGrad either.")
_STATES = _nothing("fp32_optimizer_states", "any", None, "States are fp32; `bf16.bf16_optimizer_states` makes them bf16.")
_FUSED = tuple(_nothing(name, "any", None) for name in ("foreach", "fused", "capturable", "set_grad_none"))
_MAXIMIZE = _off("maximize", "bool", False, "Negate the loss.")


def _adam(a: dict[str, Any], *, decoupled: bool) -> Built:
    decays = decoupled or a["adam_w_mode"]
    decay = a["weight_decay"]
    if decay is None:
        decay = 0.01 if a["torch_adam"] and decays else 0.0
    kind = adamw if decays else adam
    return kind(a["lr"], betas=a["betas"], eps=a["eps"], weight_decay=decay, bias_correction=a["bias_correction"])


_ADAM = (
    _lr(1e-3),
    _BETAS,
    _eps(1e-8),
    _decay(None, "`weight_decay=`; 0 by default, torch's 0.01 with `torch_adam` and decoupled decay."),
    _key("bias_correction", "bool", True, "`bias_correction=`"),
    _key("adam_w_mode", "bool", True, "Decoupled decay; only `Adam` with false is `fds.adam`."),
    _key("torch_adam", "bool", False, "Torch's default for weight decay; the kernel is torch's in any case."),
    _AMSGRAD,
    _CLIP,
    _STATES,
    _MAXIMIZE,
    *_FUSED,
)


def muon_rates(a: dict[str, Any]) -> tuple[float, float]:
    """The rates of Muon's matrices and of all else; 0 is a rate."""
    own = (a["muon_lr"], a["lr"], 0.02), (a["adam_lr"], a["lr"], 3e-4)
    matrices, rest = (next(rate for rate in each if rate is not None) for each in own)
    return matrices, rest


def _is_matrix(path: str) -> bool:
    """DeepSpeed leaves what has these words in its name to Adam; a model may have nothing else."""
    return not any(word in path.lower() for word in ("embed", "lm_head"))


def _muon(a: dict[str, Any]) -> Built:
    lr, rate = muon_rates(a)
    others = adamw if a["adam_w_mode"] else adam
    aside = others(rate, betas=a["betas"], eps=a["eps"], weight_decay=a["weight_decay"])
    return muon(lr, aside, momentum=a["momentum"], weight_decay=a["weight_decay"], matrices=_is_matrix)


def _lamb(a: dict[str, Any]) -> Built:
    trust = (a["min_coeff"], a["max_coeff"])
    correction = "rate" if a["bias_correction"] else None
    numbers: dict[str, Any] = {"betas": a["betas"], "eps": a["eps"], "weight_decay": a["weight_decay"]}
    return lamb(a["lr"], trust=trust, correction=correction, **numbers)  # type: ignore[arg-type]


def _zero_one(a: dict[str, Any]) -> Built:
    longest = a["local_step_clipper"]
    local = max(1, a["local_step_scaler"] // longest) * longest
    numbers: dict[str, Any] = {"betas": a["betas"], "eps": a["eps"], "weight_decay": a["weight_decay"]}
    each = a["var_update_scaler"]
    return zero_one_adam(a["lr"], freeze=a["var_freeze_step"], each=each, local=local, longest=longest, **numbers)


_ONE_BIT = (
    _lr(1e-3),
    _BETAS,
    _eps(1e-8),
    _decay(),
    _nothing("bias_correction", "bool", True, "The moments are corrected for their bias."),
    _nothing("cuda_aware", "bool", False, "Groups know their transport."),
    _nothing("comm_backend_name", "str", "nccl", "Groups know their transport."),
    _nothing("exp_avg_mask", "any", None, "An element without a variance does not move."),
    _AMSGRAD,
    _CLIP,
)
_GONE = "DeepSpeed 0.19.8 has removed it."

OPTIMIZERS: tuple[OptimizerRule, ...] = (
    OptimizerRule("Adam", _ADAM, partial(_adam, decoupled=False), "`fds.adamw`, or `fds.adam` with `adam_w_mode: false`."),
    OptimizerRule("AdamW", _ADAM, partial(_adam, decoupled=True), "`fds.adamw`."),
    OptimizerRule(
        "Adagrad",
        (
            _lr(1e-2),
            _eps(1e-10),
            _decay(),
            _key("initial_accumulator_value", "float", 0.0, "`initial=`", least=0),
            _off("lr_decay", "float", 0.0, "Use a scheduler."),
            _AMSGRAD,
            _STATES,
            _MAXIMIZE,
            *_FUSED,
        ),
        lambda a: adagrad(a["lr"], initial=a["initial_accumulator_value"], eps=a["eps"], weight_decay=a["weight_decay"]),
        "`fds.adagrad`.",
        betas=False,
    ),
    OptimizerRule(
        "Lamb",
        (
            _lr(1e-3),
            _BETAS,
            _eps(1e-8),
            _decay(),
            _key("max_coeff", "float", 10.0, "`trust=`", least=0),
            _key("min_coeff", "float", 0.01, "`trust=`", least=0),
            _key("bias_correction", "bool", True, '`correction="rate"`, as DeepSpeed\'s kernel does; None if false.'),
            _off("eps_inside_sqrt", "bool", False, "eps is added to the root."),
            _AMSGRAD,
            _CLIP,
        ),
        _lamb,
        "`fds.lamb`.",
    ),
    OptimizerRule(
        "Lion",
        (_lr(1e-3), _BETAS, _decay(), _STATES, *_FUSED),
        lambda a: lion(a["lr"], betas=a["betas"], weight_decay=a["weight_decay"]),
        "`fds.lion`.",
    ),
    OptimizerRule(
        "Muon",
        (
            _key("lr", "float", None, "Of both halves.", least=0),
            _key("muon_lr", "float", None, "Of matrices; 0.02 by default.", least=0),
            _key("adam_lr", "float", None, "Of all else; 0.0003 by default.", least=0),
            _key("momentum", "float", 0.95, "`momentum=`", least=0),
            _key("betas", "betas", (0.9, 0.95), "`betas=` of `fds.adamw` for all else."),
            _eps(1e-10),
            _decay(0.0, "Of both halves."),
            _key("adam_w_mode", "bool", True, "Whether `others` is `fds.adamw`."),
            _nothing("ns_method", "str", "gram", "Both ways compute the same iteration, with other roundings."),
            _nothing("torch_adam", "bool", False),
            _off("per_head_muon", "bool", False, "Matrices are orthogonalised whole."),
            _STATES,
        ),
        _muon,
        "`fds.muon` for matrices whose path has neither `embed` nor `lm_head`, `fds.adamw` for all else.",
    ),
    OptimizerRule(
        "SGD",
        (
            _lr(1e-3),
            _key("momentum", "float", 0.0, "`momentum=`", least=0),
            _decay(),
            _key("nesterov", "bool", False, "`nesterov=`"),
            _off("dampening", "float", 0.0, "Momentum is not damped."),
            _MAXIMIZE,
            *_FUSED,
        ),
        lambda a: sgd(a["lr"], momentum=a["momentum"], nesterov=a["nesterov"], weight_decay=a["weight_decay"]),
        "`fds.sgd`.",
        exact=True,
        betas=False,
    ),
    OptimizerRule(
        "OneBitAdam",
        (*_ONE_BIT, _key("freeze_step", "int", 100_000, "`warmup=`", least=1)),
        lambda a: one_bit_adam(
            a["lr"], warmup=a["freeze_step"], betas=a["betas"], eps=a["eps"], weight_decay=a["weight_decay"]
        ),
        f"`fds.one_bit_adam` with `T.local_gradients`. {_GONE}",
        reduces=True,
    ),
    OptimizerRule(
        "ZeroOneAdam",
        (
            *_ONE_BIT,
            _key("var_freeze_step", "int", 100_000, "`freeze=`", least=1),
            _key("var_update_scaler", "int", 16, "`each=`", least=1),
            _key("local_step_scaler", "int", 32_678, "`local=`, rounded down to a multiple of `local_step_clipper`.", least=1),
            _key("local_step_clipper", "int", 16, "`longest=`", least=1),
        ),
        _zero_one,
        f"`fds.zero_one_adam` with `T.local_gradients`. {_GONE}",
        reduces=True,
    ),
)
