"""DeepSpeed's engine: ``forward``, ``backward`` and ``step`` as calls, over a step in two halves."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from functional_ds import comm
from functional_ds.deepspeed.api_names import ENGINE, REFUSED
from functional_ds.deepspeed.config.ds_plan import ConfigPlan
from functional_ds.deepspeed.config.explain import UsageError

from .common.engine_counts import EngineCounts
from .common.engine_files import EngineFiles, write_weights
from .ds_optimizer import EngineOptimizer
from .engine_numbers import EngineNumbers
from .engine_reports import Reports
from .loop.engine_loop import EngineLoop
from .whole_batches import WholeBatches


class DeepSpeedEngine(WholeBatches, EngineNumbers, EngineFiles, nn.Module):
    """DeepSpeed's engine, as returned by ``initialize``: a thin layer over ``step.open``, ``backward`` and ``finish``.

    ```
    output = engine(batch)          run = step.open(state); run(apply, batch)
    engine.backward(loss)           grads = run.backward(loss)
    engine.step()                   at a boundary: state, metrics = step.finish(state, grads)
    ```

    A loop of these is bitwise ``step(state, batch)``.

    Attributes:
        module: the user's own. In stages 0 to 2 its parameters and buffers are views of the state.
        optimizer: for reading and writing learning rates; None without one.
        lr_scheduler: the config's, or the one that was passed.
        training_dataloader: over ``training_data``.
        metrics: of the last update, as tensors: "loss", "grad_norm" and those of transforms.
    """

    module: nn.Module
    optimizer: EngineOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    training: bool
    _reports: Reports
    _boundary: bool | None  # the caller's setting for the current micro-batch
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
        held["_reports"] = Reports(plan)
        held["_boundary"], held["_no_sync"], held["_stepping"] = None, False, False

    # -- passes --------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; within ``torch.no_grad()`` an evaluation."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, with the casts, gathers and recomputation of the step."""
        loop: EngineLoop = self._loop
        self._reports.begin(loop)
        with self._reports.timed("fwd"):
            output = loop.forward(loop.live.call, *args, **kwargs)
        loop.lasts(self._lasts())
        return output

    def backward(
        self,
        loss: Tensor,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Tensor:
        """Adds a loss's gradients, divided by the number of micro-batches, and returns the loss so divided.

        Several losses in one step are summed.

        Args:
            loss: a scalar that was computed from what the engine returned.
            allreduce_gradients: False is the same as ``no_sync``; removed in DeepSpeed.
            release_loss: has no effect.
            retain_graph: whether a further backward pass uses this graph.
            scale_wrt_gas: whether the loss is divided.

        Raises:
            RuntimeError: there is no optimizer; no forward pass is open.
            TypeError: the loss is not a tensor.
        """
        self._refuse_no_optimizer("backward")
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"backward: the loss is a {type(loss).__name__}, not a tensor; DeepSpeed's engines take one scalar"
            )
        loop: EngineLoop = self._loop
        if not loss.requires_grad and not any(parameter.requires_grad for parameter in loop.live.params.values()):
            raise UsageError("backward: no parameter of the model requires a gradient; call requires_grad_() before initialize")
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
        """The loss to call ``backward()`` on: ``engine.scale(loss).backward()``. Without a loss scale it is the loss."""
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
        """Whether the current micro-batch is the last of its update."""
        if self._boundary is not None:
            return bool(self._boundary)
        if not self.managed_gradient_accumulation():
            return bool(self._stepping)
        return bool((self._counts.micro_steps + 1) % self._loop.micro_batches == 0)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Overrides the count of ``step`` calls; None returns to the count.

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
        """A context in which backward passes only add to this rank's gradients; a later one, or ``step``, sums them over ranks.

        Raises:
            RuntimeError: in stages 2 and 3, whose gradients are reduced in each backward pass; within another such block.
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
        """Does nothing: the last backward pass, or ``step``, sums over ranks."""
        del bucket_size

    def empty_partition_cache(self) -> None:
        """Does nothing: gathered params live only as long as a pass needs them."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """In stage 0 drops the gradients since the last update. In other stages it has no effect, as in DeepSpeed."""
        del set_to_none
        if not self.zero_optimization():
            self._loop.zero_grad()

    # -- modules -------------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        """Sets the module's mode."""
        self.module.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        """Missing attributes are looked up in the module."""
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

    # -- weights -------------------------------------------------------------------------------------------------------

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's ``state_dict``; in stage 3 ``whole_state_dict`` has the values."""
        frozen = {name for name, p in self.module.named_parameters() if exclude_frozen_parameters and not p.requires_grad}
        return {name: value for name, value in self.module.state_dict().items() if name not in frozen}

    def whole_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The module's ``state_dict`` with whole params in the dtype of the forward pass, on the host. Collective in stage 3.

        Args:
            exclude_frozen_parameters: whether to omit those.
        """
        return self._loop.live.whole(self._loop.step, self._loop.state, frozen=not exclude_frozen_parameters)  # type: ignore[no-any-return]

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """For accelerate and transformers: the whole ``state_dict`` on rank 0, None on others. Collective."""
        state_dict = self.whole_state_dict(exclude_frozen_parameters)
        return state_dict if comm.world().rank == 0 else None

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes ``whole_state_dict`` into one file, by ``torch.save``, or as safetensors if its name ends so. Collective.

        Args:
            save_dir: created if missing.
            save_filename: the file.
            exclude_frozen_parameters: whether to leave frozen params out.
        """
        weights = self.whole_state_dict(exclude_frozen_parameters)
        if comm.world().rank == 0:
            write_weights(weights, Path(save_dir, save_filename))
        comm.barrier()
        return True

    save_fp16_model = save_16bit_model

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    _reads_deepspeed = True

    def _discard(self) -> None:
        self._loop.discard()

    # -- refused -------------------------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises an error."""
        raise RuntimeError(f"engine.compile: {REFUSED[f'{ENGINE}.compile']}")

    @property
    def enable_backward_allreduce(self) -> bool:
        """True: ranks sum in an update's last backward pass. Setting it to False raises an error."""
        return True

    @enable_backward_allreduce.setter
    def enable_backward_allreduce(self, value: bool) -> None:
        if not value:
            raise RuntimeError("enable_backward_allreduce=False: use engine.no_sync(), whose gradients the next step() sums")

    # -- the end -------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Closes logs."""
        self._reports.monitor.close()

    def _refuse_no_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise UsageError(
                f"{what}: the engine has no optimizer; name one in the config ('optimizer': {{'type': 'AdamW', ...}}), or pass "
                "optimizer= to initialize"
            )
