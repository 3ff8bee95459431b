"""DeepSpeed's engine: ``forward``, ``backward`` and ``step`` as calls, over a step in halves."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.deepspeed.api_names import ENGINE, REFUSED
from functional_ds.deepspeed.config.ds_plan import ConfigPlan
from functional_ds.deepspeed.config.explain import UsageError
from functional_ds.deepspeed.utils.loaders import RepeatingLoader
from functional_ds.modules.functional import Apply
from functional_ds.step.state import State
from functional_ds.step.step import Metrics, Step

from .common.engine_counts import CountedEngine, EngineCounts
from .common.engine_files import EngineFiles
from .config_values import ConfigValues
from .ds_optimizer import EngineOptimizer
from .engine_reports import Reports
from .engine_weights import EngineWeights
from .loop.engine_loop import EngineLoop, grad_norm_of
from .loop.monitors import Monitors

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(CountedEngine, EngineFiles, EngineWeights, ConfigValues, nn.Module):
    """What ``initialize`` returns: DeepSpeed's engine, as a thin shell over ``step.open``, ``backward`` and ``finish``.

    ```
    output = engine(batch)          run = step.open(state); run(apply, batch)
    engine.backward(loss)           grads = run.backward(loss)
    engine.step()                   at a boundary: state, metrics = step.finish(state, grads)
    ```

    Law 57: a loop of these is ``step(state, batch)``, bit for bit.

    Attributes:
        module: the user's own. In stages 0 to 2 its parameters and buffers are those of the state, without a copy.
        optimizer: what programs read and write learning rates at; None without one.
        lr_scheduler: the config's, or the one that was passed.
        training_dataloader: over ``training_data``.
        metrics: of the last update, as tensors: "loss", "grad_norm" and what transforms add.
    """

    module: nn.Module
    optimizer: EngineOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    training: bool
    _reports: Reports
    _boundary: bool | None  # what the caller has said of the micro-batch under way
    _no_sync: bool
    _stepping: bool

    def __init__(
        self,
        module: nn.Module,
        plan: ConfigPlan,
        loop: EngineLoop,
        counts: EngineCounts,
        *,
        optimizer: EngineOptimizer | None,
        lr_scheduler: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.optimizer, self.lr_scheduler, self.training_dataloader = optimizer, lr_scheduler, None
        self.collate_fn: Callable[..., Any] | None = None
        held = self.__dict__  # nn.Module's own way of setting attributes is slow
        held["plan"], held["_loop"], held["_counts"] = plan, loop, counts
        held["_reports"] = Reports.of(plan, module)
        held["_boundary"], held["_no_sync"], held["_stepping"] = None, False, False

    # -- passes --------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's value; within ``torch.no_grad()`` an evaluation."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's value, with the casts, gathers and recomputation of the step."""
        loop: EngineLoop = self._loop
        self._reports.begin(loop)
        with self._reports.timed("fwd"):
            found = loop.forward(loop.live.call, *args, **kwargs)
        loop.lasts(self._lasts())
        return found

    def backward(
        self,
        loss: Tensor,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Tensor:
        """Adds a loss's gradients, divided by the number of micro-batches, and returns the loss so divided.

        Several in one step are summed.

        Args:
            loss: a scalar that was computed from what the engine returned.
            allreduce_gradients: as False, the same as ``no_sync``; DeepSpeed has removed it.
            release_loss: of no effect.
            retain_graph: whether a further backward pass goes through this graph.
            scale_wrt_gas: whether the loss is to be divided.

        Raises:
            RuntimeError: there is no optimizer; no forward pass is open.
            TypeError: the loss is no tensor.
        """
        self._refuse_no_optimizer("backward")
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"backward: the loss is a {type(loss).__name__}, not a tensor; DeepSpeed's engines take one scalar"
            )
        loop: EngineLoop = self._loop
        loop.collect()
        micro = loop.micro_batches
        with self._reports.timed("bwd"):
            loop.backward(
                loss,
                last=self._lasts() and allreduce_gradients,
                retain_graph=retain_graph,
                factor=1 if scale_wrt_gas else micro,
            )
        self._counts.backwards += 1
        return loss.detach() / micro if scale_wrt_gas and micro > 1 else loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss for a ``backward()`` of its own: ``engine.scale(loss).backward()``. Without a loss scale it is the loss."""
        self._refuse_no_optimizer("scale")
        return self._loop.scaled(loss, last=self._lasts())  # type: ignore[no-any-return]

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Makes the update at an accumulation boundary; between boundaries it only ends the micro-batch.

        Args:
            lr_kwargs: for the ``step`` of a scheduler that was passed to ``initialize``.

        Raises:
            RuntimeError: there is no optimizer; there are no gradients; within ``no_sync``.
        """
        self._refuse_no_optimizer("step")
        if self._no_sync:
            raise UsageError("step: not within no_sync(), which only sums gradients; leave the block first")
        loop, counts = self._loop, self._counts
        held = self.__dict__
        held["_stepping"] = True
        try:
            boundary = self.is_gradient_accumulation_boundary()
            with self._reports.timed("step"):
                if boundary:
                    metrics = loop.update()
                    counts.updated(metrics, self.train_batch_size(), lr_kwargs)
                else:
                    loop.end_micro_batch()
                    counts.at_boundary = False
            counts.micro_steps += 1
        finally:
            held["_stepping"] = False
        if boundary:
            self._reports.updated(self)

    # -- accumulation --------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its update."""
        if self._boundary is not None:
            return bool(self._boundary)
        if not self.managed_gradient_accumulation():
            return bool(self._stepping)
        return bool((self._counts.micro_steps + 1) % self._loop.micro_batches == 0)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Says so instead of the count of ``step`` calls; None gives it back to the count.

        Raises:
            RuntimeError: ``managed_gradient_accumulation`` is off, so each ``step`` is a boundary.
        """
        if not self.managed_gradient_accumulation():
            raise UsageError(
                "set_gradient_accumulation_boundary: with managed_gradient_accumulation=false each engine.step() is a boundary"
            )
        self.__dict__["_boundary"] = is_boundary
        self._loop.lasts(self._lasts())

    def _lasts(self) -> bool:
        return self.managed_gradient_accumulation() and not self._no_sync and self.is_gradient_accumulation_boundary()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to this rank's gradients, which a later one or ``step`` sums over ranks.

        Raises:
            RuntimeError: in stages 2 and 3, whose gradients are summed in each backward pass; within another such block.
        """
        if self.zero_optimization_stage() >= 2:
            raise UsageError(
                f"no_sync: stage {self.zero_optimization_stage()} keeps shards of gradients, so each backward pass sums over "
                "ranks; leave no_sync out, or use stage 1"
            )
        if self._no_sync:
            raise UsageError("no_sync: not within another no_sync()")
        self.__dict__["_no_sync"] = True
        try:
            yield
        finally:
            self.__dict__["_no_sync"] = False

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing: the last backward pass, or ``step``, sums over ranks."""
        del bucket_size

    def zero_grad(self, set_to_none: bool = True) -> None:
        """In stage 0 drops the gradients since the last update. In others it has no effect, as in DeepSpeed."""
        del set_to_none
        if not self.zero_optimization():
            self._loop.zero_grad()

    # -- counts --------------------------------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """How many calls of ``step`` there were."""
        return self._counts.micro_steps  # type: ignore[no-any-return]

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
        return self._numbers("lr")

    def get_mom(self) -> list[Any]:
        """Each param group's momentum, or its betas."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        """Each param group's type."""
        return self._numbers("type")

    def _numbers(self, name: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    # -- modules -------------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        """Sets the module's mode."""
        self.module.train(mode)
        self.training = mode
        return self

    def eval(self) -> "DeepSpeedEngine":
        """Sets the module's mode."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        """What the engine does not have is the module's."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            why = REFUSED.get(f"{ENGINE}.{name}")
            if why:
                raise AttributeError(f"engine.{name}: {why}") from None
            raise AttributeError(f"neither the engine nor its {type(module).__name__} has an attribute {name!r}") from None

    def __repr__(self) -> str:
        return f"DeepSpeedEngine({type(self.module).__name__}: {self._loop.step})"

    # -- whole batches -------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One update of micro-batches ``(inputs, labels)``, of modules with a ``loss_fn``; errors drop the gradients so far.

        Returns:
            the mean loss over micro-batches and ranks.

        Args:
            data_iter: gives the micro-batches; None for the loader of ``training_data``.
        """
        batches, counts = self._batches(data_iter), self._counts
        before = counts.global_steps, counts.micro_steps
        self.train()
        try:
            for index in range(self._loop.micro_batches):
                self.set_gradient_accumulation_boundary(index == self._loop.micro_batches - 1)
                self.backward(self._loss(next(batches)))
                self.step()
        except BaseException:
            if counts.global_steps == before[0]:
                self._loop.discard()  # or the next update would sum them, too
                counts.micro_steps = before[1]
            raise
        finally:
            self.__dict__["_boundary"] = None
        return self.metrics["loss"]

    def eval_batch(self, data_iter: Iterator[Any], return_logits: bool = False) -> Any:
        """The mean loss over micro-batches and ranks, without gradients.

        Args:
            data_iter: gives the micro-batches.
            return_logits: whether to return the module's values, too.
        """
        training, values, losses = self.module.training, [], []
        self.eval()
        try:
            with torch.no_grad():
                for _ in range(self._loop.micro_batches):
                    inputs, labels = next(data_iter)
                    values.append(self(*inputs) if isinstance(inputs, tuple | list) else self(inputs))
                    losses.append(self._loss_fn(values[-1], labels))
        finally:
            self.train(training)
        loss = comm.all_reduce(torch.stack(losses).mean(), op="avg")
        return (loss, values) if return_logits else loss

    def _batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if self._loss_fn is None:
            raise RuntimeError(
                f"train_batch: {type(self.module).__name__} has no loss_fn; PipelineModule(..., loss_fn=...) has one, other "
                "programs call engine(batch), engine.backward(loss), engine.step()"
            )
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise RuntimeError("train_batch: pass data_iter, or training_data to initialize")
        if "_repeating" not in self.__dict__:
            self.__dict__["_repeating"] = RepeatingLoader(self.training_dataloader)
        return self.__dict__["_repeating"]  # type: ignore[no-any-return]

    def _loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        found = self(*inputs) if isinstance(inputs, tuple | list) else self(inputs)
        return self._loss_fn(found, labels)  # type: ignore[no-any-return]

    @property
    def _loss_fn(self) -> Any:
        return getattr(self.module, "loss_fn", None)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    _reads_deepspeed = True

    def _saved_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _settled(self) -> State:
        return self._loop.settled()  # type: ignore[no-any-return]

    def _begin_load(self) -> State:
        self._loop.discard()
        return self._loop.state  # type: ignore[no-any-return]

    def _replace(self, state: State) -> None:
        self._loop.replace(state)

    # -- for the functional side ---------------------------------------------------------------------------------------

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
        return self._settled()

    @property
    def monitor(self) -> Monitors:
        """The config's monitors: ``write_events([(name, value, engine.global_samples)])`` logs numbers of your own."""
        return self._reports.monitor

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last update's "fwd", "bwd" and "step", with ``wall_clock_breakdown``."""
        return dict(self._reports.times)

    def destroy(self) -> None:
        """Closes logs."""
        self._reports.close()

    def _refuse_no_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise UsageError(
                f"{what}: the engine has no optimizer; name one in the config ('optimizer': {{'type': 'AdamW', ...}}), or pass "
                "optimizer= to initialize"
            )
