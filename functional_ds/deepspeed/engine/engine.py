"""DeepSpeed's engine: ``forward``, ``backward`` and ``step`` as calls, over a step in halves."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.deepspeed.api_names import ENGINE, REFUSED
from functional_ds.deepspeed.config.ds_plan import ConfigPlan
from functional_ds.deepspeed.config.explain import UsageError
from functional_ds.modules.functional import Apply
from functional_ds.step.state import State
from functional_ds.step.step import Metrics, Step

from .config_values import ConfigValues
from .ds_optimizer import EngineOptimizer
from .engine_counts import EngineCounts
from .engine_files import load_engine, save_engine
from .engine_reports import Reports
from .engine_weights import EngineWeights
from .loop.engine_loop import EngineLoop, grad_norm_of
from .loop.monitors import Monitors

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(EngineWeights, ConfigValues, nn.Module):
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
    def global_steps(self) -> int:
        """How many boundaries there were, with those whose update was left out."""
        return self._counts.global_steps  # type: ignore[no-any-return]

    @property
    def global_samples(self) -> int:
        """How many rows these had."""
        return self._counts.global_samples  # type: ignore[no-any-return]

    @property
    def micro_steps(self) -> int:
        """How many calls of ``step`` there were."""
        return self._counts.micro_steps  # type: ignore[no-any-return]

    @property
    def skipped_steps(self) -> int:
        """How many updates were left out, as gradients were not finite. Reading it waits for the device."""
        self._counts.settle()
        return self._counts.skipped_steps  # type: ignore[no-any-return]

    def was_step_applied(self) -> bool:
        """Whether the last ``step`` has changed params. Reading it waits for the device."""
        self._counts.settle()
        return bool(self._counts.at_boundary and not self._counts.overflow)

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
            self.__dict__["_repeating"] = self.training_dataloader.repeating()
        return self.__dict__["_repeating"]  # type: ignore[no-any-return]

    def _loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        found = self(*inputs) if isinstance(inputs, tuple | list) else self(inputs)
        return self._loss_fn(found, labels)  # type: ignore[no-any-return]

    @property
    def _loss_fn(self) -> Any:
        return getattr(self.module, "loss_fn", None)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the state of all ranks into ``save_dir/tag``; see ``engine_files.save_engine``. Collective.

        Args:
            save_dir: a folder that all ranks see.
            tag: its name; by default ``global_step{N}``.
            client_state: what ``load_checkpoint`` is to return: plain values, tensors, arrays, or else objects, which are
                pickled. Rank 0's counts.
            save_latest: whether the file ``latest`` names it from now on.
            exclude_frozen_parameters: saves no space here, which a warning says: a state is saved whole.
        """
        if exclude_frozen_parameters:
            warnings.warn("exclude_frozen_parameters=True: a state is saved whole; see save_16bit_model", stacklevel=2)
        return save_engine(self, save_dir, tag, client_state or {}, save_latest=save_latest)

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        *,
        allow_pickle: bool = False,
    ) -> tuple[str | None, Any]:
        """Goes on from a checkpoint of any number of ranks and any stage, DeepSpeed's own among them. Collective.

        Returns:
            the folder and ``client_state``; (None, None) where the folder has no file ``latest`` and no tag is given.

        Args:
            load_dir: the folder that was passed to ``save_checkpoint``.
            tag: which one; by default the one that ``latest`` names.
            load_module_strict: False lets params differ by name.
            load_optimizer_states: False reads params alone.
            load_lr_scheduler_states: False leaves the scheduler as it is.
            load_module_only: True reads params alone, and leaves counts and scheduler as they are.
            custom_load_fn: refused.
            allow_pickle: whether objects that were pickled are unpickled, which can run any code: what in ``client_state`` or
                the scheduler's state is no plain value, tensor or array.
        """
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn: checkpoints are read shard by shard, so there is no whole state_dict to give it")
        return load_engine(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counts=not load_module_only,
            allow_pickle=allow_pickle,
        )

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
        return self._loop.settled()  # type: ignore[no-any-return]

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
