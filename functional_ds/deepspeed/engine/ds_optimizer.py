"""The optimizer that ``initialize`` returns: param groups, and the outcome of the last update."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

import torch

from functional_ds.deepspeed.config.ds_plan import ConfigPlan
from functional_ds.deepspeed.config.ds_transforms import sums_bf16_in_fp32
from functional_ds.deepspeed.ops import adagrad, adam, lamb, lion

from . import optimizer_kinds as kinds
from .common.engine_counts import EngineCounts
from .common.optimizer_groups import LiveGroup
from .loop.engine_loop import EngineLoop


def _wrapper_of(plan: ConfigPlan, basic: type | None) -> type | None:
    """The class that wraps an optimizer in DeepSpeed; None if none does.

    Args:
        plan: of the config.
        basic: the optimizer's class.
    """
    stage = plan.value("zero_optimization.stage")
    if sums_bf16_in_fp32(plan.value):
        return kinds.BF16_Optimizer
    if stage:
        return kinds.DeepSpeedZeroOptimizer_Stage3 if stage == 3 else kinds.DeepSpeedZeroOptimizer
    if not (plan.value("bf16.enabled") or plan.value("fp16.enabled")):
        return None
    return kinds.FP16_Optimizer if basic is not None and issubclass(basic, adam.FusedAdam) else kinds.FP16_UnfusedOptimizer


_KINDS: Mapping[str, tuple[type, type]] = MappingProxyType(
    {
        "adagrad": (torch.optim.Adagrad, adagrad.DeepSpeedCPUAdagrad),
        "adam": (adam.FusedAdam, adam.DeepSpeedCPUAdam),
        "adamw": (adam.FusedAdam, adam.DeepSpeedCPUAdam),
        "lamb": (lamb.FusedLamb, lamb.FusedLamb),
        "lion": (lion.FusedLion, lion.DeepSpeedCPULion),
        "sgd": (torch.optim.SGD, torch.optim.SGD),
    }
)  # where states are on the device, and where they are offloaded


def _decays(plan: ConfigPlan) -> bool:
    """Whether a config's Adam is AdamW."""
    params = plan.value("optimizer.params") or {}
    return bool(plan.value("optimizer.type").lower() == "adamw" or params.get("adam_w_mode", True))


def _basic_of(plan: ConfigPlan) -> type | None:
    """DeepSpeed's class for the optimizer that a config names; None if there is none here."""
    name, value = str(plan.value("optimizer.type")).lower(), plan.value
    if name.startswith("adam") and (value("optimizer.params") or {}).get("torch_adam"):
        return torch.optim.AdamW if _decays(plan) else torch.optim.Adam
    offloads = value("zero_optimization.cpu_offload") or value("zero_optimization.offload_optimizer.device") != "none"
    return _KINDS[name][bool(offloads)] if name in _KINDS else None


def _refused(call: str, advice: str) -> Callable[..., NoReturn]:
    """A method that raises an error: the engine has it instead of the optimizer."""

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"optimizer.{call}: {advice}")

    refuse.__doc__ = f"Refused: {advice}."
    return refuse


class EngineOptimizer(torch.optim.Optimizer):
    """The engine's optimizer, for schedulers and programs that read and write ``param_groups[i]["lr"]``.

    Written values (rates, betas, weight decay and so on) apply from the next update on. A config's scheduler sets the rate
    after each update, as in DeepSpeed.

    ``isinstance`` answers as in DeepSpeed: ``DeepSpeedZeroOptimizer`` in stages 1 and 2, for example. In stage 0 in fp32, where
    DeepSpeed returns the optimizer itself, it is of that optimizer's class and equal to it.

    Attributes:
        optimizer: the one that was passed to ``initialize``; for a config's, one of its class in DeepSpeed, such as FusedAdam,
            with the same groups.
        adam_w_mode: of a config's Adam, whether it is AdamW.
    """

    _kind: type | None = None

    def __init__(
        self,
        groups: Sequence[LiveGroup],
        client: torch.optim.Optimizer | None,
        counts: EngineCounts,
        loop: EngineLoop,
        plan: ConfigPlan,
        *,
        shown_class: type | None = None,
    ) -> None:
        self._counts, self._loop, self._plan = counts, loop, plan
        self._groups: list[dict[str, Any]] = []
        super().__init__([group.given for group in groups], {} if client is None else client.defaults)
        if client is None:  # torch's schedulers read them; no group is filled from them
            self.defaults = {name: value for name, value in groups[0].given.items() if name != "params"}
        inner_class = _basic_of(plan) if client is None else type(client)
        wrapper = _wrapper_of(plan, inner_class)
        self._bare = client is not None and wrapper is None
        self._kind = shown_class or wrapper or inner_class  # torch's constructor above must not see it
        self.optimizer: torch.optim.Optimizer = self
        if client is not None:
            self.optimizer, self._groups = client, client.param_groups
        elif wrapper is not None and shown_class is None:
            self.optimizer = EngineOptimizer(groups, None, counts, loop, plan, shown_class=inner_class or EngineOptimizer)
        if client is None and "adam" in str(plan.value("optimizer.type")).lower():
            self.adam_w_mode = _decays(plan)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises an error, except in torch's constructor: parameters of a further group would have no state."""
        if hasattr(self, "optimizer"):
            raise RuntimeError("optimizer.add_param_group(...): pass all groups to initialize; those of rate 0 stay unchanged")
        super().add_param_group(param_group)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For ``isinstance``, in addition to the type itself."""
        return self._kind or EngineOptimizer

    def __eq__(self, other: object) -> bool:
        return self is other or (self._bare and other is self.optimizer)

    def __hash__(self) -> int:
        return hash(self.optimizer) if self._bare else id(self)

    @property
    def low_precision_dtype(self) -> torch.dtype:
        """The dtype in which the loss is computed."""
        plan = self._plan
        return torch.float16 if plan.value("fp16.enabled") else torch.bfloat16 if plan.value("bf16.enabled") else torch.float32

    @property
    def loss_scaler(self) -> SimpleNamespace:
        """The loss scale, whether it is dynamic, the number of updates, and its parameters in the config."""
        window, least = (self._plan.value(f"fp16.{name}") for name in ("loss_scale_window", "min_loss_scale"))
        return SimpleNamespace(
            dynamic_loss_scale=self.dynamic_loss_scale,
            cur_scale=self.cur_scale,
            loss_scale=self.cur_scale,
            cur_iter=self._counts.global_steps,
            scale_window=window,
            min_loss_scale=least,
        )

    loss_scale_config = loss_scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale is dynamic."""
        return bool(self._plan.value("fp16.enabled") and not self._plan.value("fp16.loss_scale"))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The dicts, with the rates of the next update."""
        self._counts.settle()
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped because a gradient was not finite."""
        self._counts.settle()
        return self._counts.overflow

    @property
    def cur_scale(self) -> float:
        """The factor of the next loss."""
        return self._loop.loss_scale()

    loss_scale = cur_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``engine.zero_grad``; also in stage 3, as in DeepSpeed."""
        del set_to_none
        if self._plan.value("zero_optimization.stage") in (0, 3):
            self._loop.zero_grad()

    step = _refused("step()", "call engine.step(), which makes the update at each accumulation boundary")
    state_dict = _refused("state_dict()", "use engine.save_checkpoint(folder), which writes what all ranks have")
    load_state_dict = _refused("load_state_dict(...)", "use engine.load_checkpoint(folder)")
    backward = _refused("backward(loss)", "call engine.backward(loss)")
