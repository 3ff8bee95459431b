"""What an engine answers of its last update and its next one, and the step, function and state that it runs."""

from typing import Any

from functional_ds.modules.functional import Apply
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .common.engine_counts import CountedEngine
from .engine_reports import Reports
from .loop.engine_loop import grad_norm_of
from .loop.monitors import Monitors

__all__ = ["EngineNumbers"]


class EngineNumbers(CountedEngine):
    """Questions of an engine whose answers change with each update."""

    _loop: Any
    _reports: Reports

    def _groups(self) -> list[dict[str, Any]]:
        """The param groups, as they are now."""
        raise NotImplementedError

    @property
    def micro_steps(self) -> int:
        """How many calls of ``step`` there were."""
        return self._counts.micro_steps

    @property
    def metrics(self) -> Metrics:
        """The last update's, as tensors: "loss" unless ``loss.backward()`` was called, "grad_norm" with clipping, "skipped"."""
        return self._loop.metrics  # type: ignore[no-any-return]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last update's gradients before they were clipped; infinite where these were not finite.

        None before the first update, in stage 0 in fp32 without clipping, and with ``compute_grad_norm: false``.
        """
        return grad_norm_of(self._loop.metrics)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group in the next update."""
        return [group.get("lr", 0.0) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Each param group's momentum, or its betas."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """Each param group's type."""
        return [group.get("type", 0.0) for group in self._groups()]

    @property
    def functional_step(self) -> Step:
        """The step that the engine runs."""
        return self._loop.step  # type: ignore[no-any-return]

    @property
    def functional_apply(self) -> Apply:
        """The module as a function. What is set on ``functional_apply.module`` holds from the next forward pass on."""
        return self._loop.live.apply  # type: ignore[no-any-return]

    @property
    def state(self) -> State:
        """Its state. An update takes the state's memory, so keep none of them."""
        return self._loop.settled()  # type: ignore[no-any-return]

    @property
    def monitor(self) -> Monitors:
        """The config's monitors: ``write_events([(name, value, engine.global_samples)])`` logs numbers of your own."""
        return self._reports.monitor

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last update's "fwd", "bwd" and "step", with ``wall_clock_breakdown``."""
        return dict(self._reports.times)
