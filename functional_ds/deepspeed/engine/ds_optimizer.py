"""What ``initialize`` returns as the optimizer: param groups, and what became of the last update."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from functional_ds.deepspeed.config.ds_plan import ConfigPlan

from .common.engine_counts import EngineCounts
from .common.optimizer_groups import LiveGroup
from .loop.engine_loop import EngineLoop
from .optimizer_kinds import kind_of

__all__ = ["EngineOptimizer"]


def _refused(call: str, advice: str) -> Callable[..., NoReturn]:
    """A method that the engine has in the optimizer's place."""

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"optimizer.{call}: {advice}")

    refuse.__doc__ = f"Refused: {advice}."
    return refuse


class EngineOptimizer(torch.optim.Optimizer):
    """The engine's optimizer, for schedulers and programs that read and write ``param_groups[i]["lr"]``.

    What is written there holds from the next update on; so do betas, weight decay and the like. A config's scheduler sets the
    rate after each update, as in DeepSpeed.

    ``isinstance`` says what it is in DeepSpeed: ``DeepSpeedZeroOptimizer`` in stages 1 and 2, for example. In stage 0 in fp32,
    where DeepSpeed returns the optimizer itself, it is of that optimizer's class and equal to it.

    Attributes:
        optimizer: the one that was passed to ``initialize``; for a config's this object.
    """

    _kind: type | None = None

    def __init__(
        self,
        groups: Sequence[LiveGroup],
        client: torch.optim.Optimizer | None,
        counts: EngineCounts,
        loop: EngineLoop,
        plan: ConfigPlan,
    ) -> None:
        self._counts, self._loop, self._plan = counts, loop, plan
        self._groups: list[dict[str, Any]] = []
        super().__init__([group.given for group in groups], {} if client is None else client.defaults)
        if client is None:  # torch's schedulers read them; no group is filled from them
            self.defaults = {name: value for name, value in groups[0].given.items() if name != "params"}
        self.optimizer: torch.optim.Optimizer = self if client is None else client
        if client is not None:
            self._groups = client.param_groups
        wrapper = kind_of(plan, client)
        self._bare = client is not None and wrapper is None
        self._kind = type(client) if self._bare else wrapper  # torch's constructor above must not see it

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What ``isinstance`` goes by, beside the type itself."""
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
    def loss_scale_config(self) -> SimpleNamespace:
        """``dynamic_loss_scale`` and ``cur_scale``."""
        return SimpleNamespace(dynamic_loss_scale=self.dynamic_loss_scale, cur_scale=self.cur_scale)

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale moves."""
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
        """Whether the last update was left out, because a gradient was not finite."""
        self._counts.settle()
        return self._counts.overflow

    @property
    def cur_scale(self) -> float:
        """What the next loss is multiplied by."""
        return self._loop.loss_scale()

    loss_scale = cur_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``engine.zero_grad``."""
        del set_to_none
        if not self._plan.value("zero_optimization.stage"):
            self._loop.zero_grad()

    step = _refused("step()", "call engine.step(), which makes the update at each accumulation boundary")
    state_dict = _refused("state_dict()", "use engine.save_checkpoint(folder), which writes what all ranks have")
    load_state_dict = _refused("load_state_dict(...)", "use engine.load_checkpoint(folder)")
    backward = _refused("backward(loss)", "call engine.backward(loss)")
