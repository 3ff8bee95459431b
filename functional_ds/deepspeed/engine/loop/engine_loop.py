"""What an engine keeps between its calls: a state, the open pass, the gradients so far, and counts."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.deepspeed.config.ds_optimizers import rule_of
from functional_ds.deepspeed.config.ds_plan import ConfigPlan
from functional_ds.step.compose import wrap
from functional_ds.step.open_pass import OpenPass
from functional_ds.step.pass_gradients import Gradients
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

from .live_module import LiveModule

_HERE = threading.local()  # whether an engine of this thread runs a backward pass


@attrs.define(eq=False)
class LossShare:
    """Scales the weight of an update's gradients, so that a sum of losses is divided by the number of micro-batches.

    Each pass has weight one, and an update has as many passes as micro-batches, unless the loop does otherwise.

    Attributes:
        factor: of the weight.
        norm_times: the factor of the gradients' norm for the metric "grad_norm"; 0 to not compute it.
    """

    factor: float = 1.0
    norm_times: float = 0.0

    @staticmethod
    def of(plan: ConfigPlan) -> "LossShare":
        """With the norm if DeepSpeed computes it and no clipping does: not in stage 0 in fp32.

        Cost: a pass over the gradients and a sum of one number over ranks; ``zero_optimization.compute_grad_norm: false``
        avoids it.
        """
        half = plan.value("fp16.enabled") or plan.value("bf16.enabled")
        computed = plan.value("zero_optimization.compute_grad_norm") if plan.value("zero_optimization.stage") else half
        rule = rule_of(plan.value("optimizer.type") or "")
        if plan.value("gradient_clipping") or not computed or (rule is not None and rule.reduces):
            return LossShare()
        return LossShare(norm_times=plan.batch.world_size if plan.value("gradient_allreduce_op") == "sum" else 1.0)

    def transform(self) -> Transform:
        """Scales the weight, and measures the gradients."""

        def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
            if self.factor != 1:
                grads = tree.replace(grads, weight=grads.weight * self.factor)
            if not self.norm_times:
                return inner(step, state, grads)  # type: ignore[no-any-return]
            norm = step.norm(state, grads.sum) * (self.norm_times / grads.weight)
            state, metrics = inner(step, state, grads)
            return state, {**metrics, "grad_norm": norm}

        return wrap("engine", traits=[Trait.HEEDS_SKIPS], update=update)


def grad_norm_of(metrics: Metrics) -> float | None:
    """An update's norm as DeepSpeed reports it; None if it was not computed."""
    norm = metrics.get("grad_norm")
    return None if norm is None else math.inf if metrics.get("skipped", 0) > 0 else float(norm)


@attrs.define(eq=False)
class EngineLoop:
    """A step in halves, driven by calls of ``forward``, ``backward`` and ``update``.

    Attributes:
        step: the step.
        state: before the next update.
        live: the module.
        share: of the step's transform.
        micro_batches: how many an update has.
        metrics: the last update's.
        grads: of the passes since then; None for none.
    """

    step: Step
    state: State
    live: LiveModule
    share: LossShare
    micro_batches: int
    metrics: Metrics = attrs.field(factory=dict)
    grads: Gradients | None = None
    _run: OpenPass | None = None  # that functions run in
    _touched: bool = False  # whether a backward pass has come to what it returned
    _direct: bool = False  # whether that was a loss.backward() of the user's
    _begun: bool = False  # whether ``backward`` was called for it
    _passes: int = 0  # with a backward, since the last update
    _backwards: int = 0  # since the last micro-batch's end
    _several: bool = False  # whether the last boundary had more than one

    # -- calls -------------------------------------------------------------------------------------------------------------

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(params, *args, **kwargs)``, in the open pass, or in a new one."""
        self.live.follow_modes()
        self.live.follow_values(self.rest)
        if not torch.is_grad_enabled():
            with self.step.open(self.state, None, self.grads, trains=False) as run:
                return run(function, *args, **kwargs)
        if self._touched or self._begun:
            self._end_pass()
        if self._run is None:
            self._run = self.step.open(self.state, None, self.grads)
        run = self._run
        with self._ending():
            output = run(function, *args, **kwargs)

        def reached(_: Tensor) -> None:
            if run is self._run:
                self._touched = True
                self._direct |= not getattr(_HERE, "backward", False)

        for leaf in tree.leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(reached)
        return output

    def backward(self, loss: Any, *, last: bool, retain_graph: bool, factor: int = 1) -> None:
        """Adds a loss's gradients, times ``factor``."""
        run = self._run
        if run is None:
            raise RuntimeError(
                "backward: no forward pass is open. Compute the loss from what engine(...) returns, not from engine.module(...)"
                " or in torch.no_grad(), and call engine.step() after engine.backward(loss)"
            )
        value = loss if factor == 1 else loss * factor
        before, _HERE.backward = getattr(_HERE, "backward", False), True
        try:
            with self._ending():
                self.grads = run.backward(value, last=last and not self._several, retain_graph=retain_graph, close=False)
        finally:
            _HERE.backward = before
        self._count()

    def scaled(self, loss: Any, *, last: bool) -> Tensor:
        """The loss to differentiate by its own ``backward()``."""
        if self._run is None:
            raise RuntimeError("scale: no forward pass is open; compute the loss from what engine(...) returns")
        self._run.last = last
        return self._run.scaled(loss)

    def lasts(self, last: bool) -> None:
        """Sets whether a ``loss.backward()`` that may follow is the update's last one."""
        if self._run is not None:
            self._run.last = last and not self._several

    def collect(self) -> None:
        """Takes the gradients of a ``loss.backward()`` of the user's, if there was one.

        Raises:
            RuntimeError: the loss used a parameter of the module itself.
        """
        if self._direct and self._run is not None:
            for name, parameter in self.live.params.items():
                if parameter.grad is not None:
                    raise RuntimeError(
                        f"loss.backward() gave the parameter {name!r} of engine.module a .grad, which the update does not "
                        "include: compute from parameters in the module's forward, and set each .grad to None before"
                    )
            with self._ending():
                self.grads = self._run.collect(close=False)
            self._direct = False
            self._count()

    def settled(self) -> State:
        """The state, with what a pass has written into buffers that only other params' backward passes go through."""
        self.collect()
        if self._touched and not self._begun:
            self._end_pass()
        self.live.follow_values(self.rest)
        return self.state

    def end_micro_batch(self) -> None:
        """Further passes belong to the next micro-batch."""
        self.collect()
        self._backwards = 0

    def update(self) -> Metrics:
        """The update from the passes so far; the sum of their losses is divided by ``micro_batches``."""
        self.collect()
        grads = self.grads
        if grads is None:
            raise RuntimeError("step: there are no gradients; call engine.backward(loss) since the last update")
        self.live.follow_values(self.rest)
        if self._run is not None:
            self._run.close()
        several, self.share.factor = self._backwards > 1, self.micro_batches / self._passes
        self.discard()
        self.state, self.metrics = self.step.finish(self.state, grads)
        self.live.show(self.step, self.state)
        self._several = several
        return self.metrics

    def discard(self) -> None:
        """Drops the passes since the last update."""
        if self._run is not None:
            self._run.close()
        self._forget_pass()
        self.grads, self._passes, self._backwards = None, 0, 0

    def zero_grad(self) -> None:
        """Drops the gradients since the last update, but no forward pass.

        Raises:
            RuntimeError: a forward pass that adds to them is open.
        """
        self.collect()
        if self.grads is not None:
            if self._run is not None and not (self._begun or self._touched):
                raise RuntimeError(
                    "zero_grad: amid accumulation, between engine(...) and engine.backward(loss), there is no way back to the "
                    "gradients before; call it before engine(...)"
                )
            self.discard()

    def summed(self) -> tuple[list[Tensor], Tensor] | None:
        """The gradients since the last update and their divisor; None until they are summed over ranks."""
        self.collect()
        grads = self.grads
        if grads is None:
            return None
        reduced = self.step.has(Trait.SUMS_LAST) is None
        totals = grads.carry if reduced and grads.final is None else grads.final
        if totals is None or (grads.carry is not None and totals is grads.final):
            return None
        ranks = self.step.batch_shard(self.state)[1]
        return totals.sum, totals.weight * (ranks * self.micro_batches / self._passes)

    def loss_scale(self) -> float:
        """The factor of the next loss."""
        held = getattr(self.state.slots.get("mixed_precision"), "loss_scale", None)
        return float(getattr(held, "value", 1.0))

    def replace(self, state: State) -> None:
        """Continues with another state."""
        self.discard()
        self.state = state
        self.live.show(self.step, state)

    def rest(self) -> None:
        """Ends the open pass before a write into the state's memory, because its graph would read other values.

        Raises:
            RuntimeError: its backward pass is still pending.
        """
        self.collect()
        if self._run is not None and not (self._begun or self._touched):
            raise RuntimeError("params cannot be set between engine(...) and engine.backward(loss); do it after engine.step()")

    # -- passes ------------------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        self._passes += not self._begun
        self._backwards += 1
        self._begun, self._touched = True, False

    def _end_pass(self) -> None:
        """The open pass has had its backward, or one that went through it to other params; a new one follows."""
        self.collect()
        run = self._run
        if run is None:
            return
        run.close()
        if not self._begun and self.grads is None:  # buffers stay as a module's own forward pass leaves them
            self.state = tree.replace(self.state, slots=run.written().slots)
            self.live.show(self.step, self.state)
        self._forget_pass()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """An error within the block has closed the pass."""
        try:
            yield
        except BaseException:
            self._forget_pass()
            raise

    def _forget_pass(self) -> None:
        self._run, self._touched, self._direct, self._begun = None, False, False, False
