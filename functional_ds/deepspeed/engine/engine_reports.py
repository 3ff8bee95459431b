"""What an engine prints and logs: times, operations, collectives, losses and rates."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import attrs
import torch

from functional_ds import comm
from functional_ds.deepspeed.config.ds_plan import ConfigPlan

from .loop.monitors import Monitors

_OFF = nullcontext()
_TIMES = {"fwd": "forward", "bwd": "backward", "step": "step"}  # in monitors


@attrs.define(eq=False)
class Reports:
    """The logs of one engine that its plan asks for.

    Attributes:
        monitor: what logs numbers.
        times: milliseconds of the last update's calls, by "fwd", "bwd" and "step", with ``wall_clock_breakdown``.
    """

    _plan: ConfigPlan = attrs.field(alias="plan")
    monitor: Monitors = attrs.field(init=False)
    times: dict[str, float] = attrs.field(factory=dict)
    _clock: bool = attrs.field(init=False)
    _profiling: bool = attrs.field(init=False)  # whether steps are measured
    _profiled: Any = None
    _window: ExitStack | None = None
    _spent: dict[str, float] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.monitor, self._clock = Monitors.of(self._plan), bool(self._plan.value("wall_clock_breakdown"))
        self._profiling = self._clock or any(map(self._plan.value, ("flops_profiler.enabled", "comms_logger.enabled")))

    def timed(self, name: str) -> AbstractContextManager[None]:
        """A part of the engine's time."""
        return self._timing(name) if self._clock else _OFF

    @contextlib.contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        began = _now()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + (_now() - began) * 1000

    def begin(self, loop: Any) -> None:
        """A forward pass follows; at the first one of an update, begins a measured step if it is to be profiled."""
        if not self._profiling or self._window is not None or not torch.is_grad_enabled():
            return
        from functional_ds.profiling.profiler import profile  # may be left out of an installation

        value = self._plan.value
        if self._profiled is None:
            skip = int(value("flops_profiler.profile_step")) if value("flops_profiler.enabled") else 1
            self._profiled = profile(loop.step, skip=skip, every=self._every(), flops=bool(value("flops_profiler.enabled")))
        self._window = ExitStack()
        rows = torch.empty(self._plan.batch.rows, device="meta")
        plain = loop.step
        loop.step = self._window.enter_context(self._profiled.call(loop.state, rows))
        self._window.callback(setattr, loop, "step", plain)

    def updated(self, engine: Any) -> None:
        """An update is over."""
        window, self._window = self._window, None
        if window is not None:
            window.close()
        done, rank = engine.global_steps, comm.world().rank
        every = self._plan.value("steps_per_print")
        if every and done % every == 0 and rank == 0:
            logging.getLogger("DeepSpeed").info(
                "step=%d, skipped=%d, lr=%s, mom=%s", done, engine.skipped_steps, engine.get_lr(), engine.get_mom()
            )
        if self._clock:
            self.times, self._spent = self._spent, {}
            if done % self._every() == 0 and rank == 0:
                sys.stdout.write("time (ms) | " + " | ".join(f"{name}: {ms:.2f}" for name, ms in self.times.items()) + "\n")
        if self._profiled is not None:
            self._show_profile(done)
        self._log(engine)

    def _every(self) -> int:
        interval = self._plan.value("steps_per_print") or 10
        return int(interval) if interval != float("inf") else 2**62

    def _show_profile(self, done: int) -> None:
        value = self._plan.value
        flops = value("flops_profiler.enabled") and done == value("flops_profiler.profile_step") + 1
        details = (self._clock or value("comms_logger.enabled")) and done > 1 and done % self._every() == 0
        if not (flops or details):
            return
        profile = self._profiled.result()  # collective
        if comm.world().rank == 0:
            path = value("flops_profiler.output_file") if flops else None
            if path:
                Path(path).write_text(str(profile), encoding="utf-8")
            else:
                sys.stdout.write(f"{profile}\n")
        if flops and not (self._clock or value("comms_logger.enabled")):
            self._profiling, self._profiled = False, None

    # -- monitors ----------------------------------------------------------------------------------------------------------

    def _log(self, engine: Any) -> None:
        if self.monitor.enabled:
            loss = engine.metrics.get("loss")  # none where programs have called loss.backward() themselves
            numbers = {} if loss is None else {"train_loss": loss}
            numbers["lr"] = engine.get_lr()[0]
            if engine.fp16_enabled():
                numbers["loss_scale"] = engine.optimizer.cur_scale
            numbers |= {f"elapsed_time_ms_{_TIMES[name]}": ms for name, ms in self.times.items()}
            done = engine.global_samples
            self.monitor.write_events((f"Train/Samples/{name}", value, done) for name, value in numbers.items())


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
