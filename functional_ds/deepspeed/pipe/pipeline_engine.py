"""``PipelineEngine``: DeepSpeed's ``train_batch`` and ``eval_batch`` over a step that is a pipeline."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import attrs
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from functional_ds.base.tree import setting
from functional_ds.deepspeed.api_names import ENGINE, PIPELINE_ENGINE, REFUSED
from functional_ds.deepspeed.config.ds_plan import ConfigPlan, from_ds_config
from functional_ds.deepspeed.engine.common.config_scheduler import ConfigScheduler
from functional_ds.deepspeed.engine.common.engine_counts import CountedEngine, EngineCounts
from functional_ds.deepspeed.engine.common.engine_files import EngineFiles
from functional_ds.deepspeed.engine.loop.engine_loop import LossShare, grad_norm_of
from functional_ds.deepspeed.engine.loop.live_module import LiveModule, take_over
from functional_ds.deepspeed.engine.loop.monitors import Monitors
from functional_ds.deepspeed.utils.loaders import EngineLoader, RepeatingLoader, data_loader
from functional_ds.optim.optimizer import Optimizer, PerParameter
from functional_ds.step.compose import compose
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.state.state import State
from functional_ds.step.train_step import train_step

from .pipeline_module import PipelineModule
from .pipeline_parts import PipelineParts, pipeline_parts
from .topology import PipelineParallelGrid

_WHOLE = "the micro-batches of a pipeline run together: call train_batch or eval_batch"


@attrs.frozen(eq=False)
class GivenOptimizer:
    """Replaces a config's optimizer and scheduler in a pipeline; by default none.

    Attributes:
        counts: of the engine, with the scheduler that moves the groups' rates.
        rule: the optimizer.
        groups: its param groups, whose numbers the rule follows.
    """

    counts: EngineCounts
    rule: Optimizer | PerParameter | None = None
    groups: list[dict[str, Any]] = attrs.field(factory=list)


class PipelineEngine(CountedEngine, EngineFiles):
    """An engine whose update takes ``gradient_accumulation_steps()`` micro-batches from an iterator.

    Law: its losses and params are those of the module on one device, on the micro-batches of all data-parallel ranks.

    Attributes:
        module: the ``PipelineModule``. The params of this rank's stage are the state's present ones; those of other stages are
            empty. ``module_state_dict()`` has all.
        training_dataloader: the loader of ``training_data``; None without it.
        lr_scheduler: the config's, or the one that was passed.
        plan: of the config.
        monitor: the config's monitors, which get "lr", "train_loss" and "eval_loss" by rows, and in fp16 "loss_scale".
        grid: which ranks share a stage, a pipeline, a slice.
    """

    module: PipelineModule

    def __init__(
        self,
        module: PipelineModule,
        plan: ConfigPlan,
        parts: PipelineParts,
        step: Any,
        given: "GivenOptimizer",
    ) -> None:
        self.module, self._counts = module, given.counts
        self.lr_scheduler, self._given = given.counts.scheduler, given
        self.training_dataloader: EngineLoader | None = None
        self.plan, self._parts, self._step = plan, parts, step
        self.monitor = Monitors.of(plan)
        self.grid = PipelineParallelGrid(module.topology())
        state = step.init(parts.params, modules=parts.modules)
        stage = plan.value("zero_optimization.stage")
        module.empty_bare()
        self._live = LiveModule(module, parts.modules["stage 0"], dict(module.named_parameters()), stage < 3)  # modes are ours
        self.state = state
        self._live.clear_others(state)
        self._metrics: Metrics = {}
        self._iterator: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None

    # -- data

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        """Takes the micro-batches from a loader, which is repeated."""
        self._iterator = None if loader is None else RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Takes the micro-batches from an iterator."""
        self._iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Sets the function from an entry of the data to (inputs, labels)."""
        self._batch_fn = fn

    def _next(self, count: int) -> Any:
        if self._iterator is None:
            raise ValueError("train_batch: there is no data; pass data_iter, or training_data to initialize")
        micros = [next(self._iterator) for _ in range(count)]
        return self._parts.joined(micros if self._batch_fn is None else map(self._batch_fn, micros))

    # -- updates

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One update; the mean loss of all ranks. Every rank of a pipeline passes the same data.

        Raises:
            StopIteration: the data have too few micro-batches.
            ValueError: there are no data.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        batch = self._next(self.gradient_accumulation_steps())
        self.state, metrics = self._step(self.state, batch)
        self._metrics = metrics
        self._counts.updated(metrics, self.train_batch_size(), None)
        loss: Tensor = metrics["loss"]
        if self.monitor.enabled:
            held = getattr(self.state.slots.get("mixed_precision"), "loss_scale", None)
            scale = {"loss_scale": held.value} if held is not None and self.fp16_enabled() else {}
            self._log(lr=self.get_lr()[0], **scale, train_loss=loss)
        return loss

    def _log(self, **numbers: Any) -> None:
        self.monitor.write_events((f"Train/Samples/{name}", value, self.global_samples) for name, value in numbers.items())

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """The mean loss of all ranks, in the modules' evaluation mode.

        Args:
            data_iter: of micro-batches; it does not replace that of ``train_batch``.
            return_logits: unsupported.
            compute_loss: False is unsupported.
            reduce_output: "avg"; others are unsupported.
            bcast_loss: has no effect: every rank has the loss.
            num_micro_batches: how many are taken; by default as many as for an update.
        """
        if return_logits or not compute_loss or reduce_output != "avg":
            raise ValueError(
                "eval_batch: only the mean loss is available; run engine.module for outputs, with module_state_dict() loaded"
            )
        with setting(self, _iterator=data_iter):
            batch = self._next(num_micro_batches or self.gradient_accumulation_steps())
        self._parts.train(False)
        try:
            loss: Tensor = self._step.evaluate(self.state, batch)
        finally:
            self._parts.train(self.module.training)
        if self.monitor.enabled:
            self._log(eval_loss=loss)
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises an error."""
        raise TypeError(_WHOLE)

    __call__ = backward = step = forward

    def train(self, mode: bool = True) -> "PipelineEngine":
        """Sets the mode of the modules."""
        self.module.train(mode)
        self._parts.train(mode)
        return self

    def eval(self) -> "PipelineEngine":
        """The modules' evaluation mode."""
        return self.train(False)

    # -- numbers

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an update."""
        return self.gradient_accumulation_steps()

    @property
    def micro_steps(self) -> int:
        """Micro-batches of the updates so far."""
        return self.global_steps * self.gradient_accumulation_steps()

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.module.num_stages

    @property
    def stage_id(self) -> int:
        """This rank's stage."""
        return self.module.stage_id

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stage_id == self.num_stages - 1

    def get_data_parallel_rank(self) -> int:
        """Which of the pipelines this rank is in."""
        return self.grid.data_parallel_id

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def is_gradient_accumulation_boundary(self) -> bool:
        """False: between calls of ``train_batch`` no update is in progress."""
        return False

    def get_additional_losses(self) -> None:
        """None: a ``loss_fn`` gives one scalar."""

    def reset_activation_shape(self) -> None:
        """Does nothing: each update may have its own shapes."""

    def __getattr__(self, name: str) -> Any:
        why = REFUSED.get(f"{PIPELINE_ENGINE}.{name}") or REFUSED.get(f"{ENGINE}.{name}")
        raise AttributeError(f"engine.{name}: {why or 'a PipelineEngine has no such attribute'}")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer, with the rates of the next update."""
        self._counts.settle()
        return self._given.groups

    def get_lr(self) -> list[float]:
        """The rate of the next update, for each param group."""
        if self.param_groups:
            return [float(group["lr"]) for group in self.param_groups]
        schedule = self.plan.schedule
        return [self.plan.value("optimizer.params")["lr"]] if schedule is None else [schedule.rate(int(self.state.step))]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last update's gradients before clipping; as ``DeepSpeedEngine``'s."""
        return grad_norm_of(self._metrics)

    # -- params

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> "OrderedDict[str, Tensor]":
        """All stages' params and buffers by name, on every rank. Collective."""
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        held = self._step.params(self.state).items()
        state_dict = OrderedDict((name, p) for name, p in held if not (exclude_frozen_parameters and name in frozen))
        buffers = self._step.module_buffers(self.state).values()
        state_dict.update(
            (name, x) for stage_buffers in buffers for name, x in stage_buffers.items() if name in self.module.state_dict()
        )
        return state_dict

    # -- checkpoints

    def _groups(self) -> list[dict[str, Any]]:
        return self.param_groups

    @property
    def state(self) -> State:
        """The step's present state. An update donates it, so do not keep it."""
        self._live.follow_values(lambda: None)
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._live.show(self._step, state)


def pipeline_engine(
    module: PipelineModule,
    config: Any,
    *,
    make: Callable[[ConfigPlan, EngineCounts], GivenOptimizer] | None = None,
    lr: float | None = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
) -> PipelineEngine:
    """``initialize`` for a ``PipelineModule``. Collective.

    Args:
        module: the layers; of each parameter the first rank's value is used that has its stage, of those given whole rank 0's.
        config: as for ``from_ds_config``. Its batch sizes are per data-parallel rank, same as DeepSpeed.
        make: from the config's plan and the engine's counts to replacements of its optimizer and scheduler.
        lr: the rate of an optimizer that the config does not have, for a scheduler in it.
        training_data: each data-parallel rank reads its part; ``train_batch`` without an iterator in order, as in DeepSpeed,
            and ``engine.training_dataloader`` shuffled, as torch's DistributedSampler does.
        collate_fn: makes a micro-batch of rows.

    Raises:
        ConfigError: a key is unsupported.
        ValueError: neither the config nor the call has an optimizer; a tied layer of several stages has buffers.

    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model = PipelineModule([nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)], num_stages=1, loss_fn=nn.functional.mse_loss)
    >>> optimizer = {"type": "SGD", "params": {"lr": 0.01}}
    >>> sizes = {"train_batch_size": 4, "gradient_accumulation_steps": 2}
    >>> engine = pipeline_engine(model, {**sizes, "optimizer": optimizer})
    >>> data = [(torch.ones(2, 2), torch.zeros(2, 1))] * 4
    >>> first, second = engine.train_batch(iter(data)), engine.train_batch(iter(data))
    >>> bool(second < first), engine.global_steps
    (True, 2)
    """
    take_over({name: module.holders(name) for name, _ in module.named_parameters()}, module)
    parts = pipeline_parts(module)
    plan = from_ds_config(config, parts.data.size, group=parts.data, lr=lr, warn=True)
    whole = plan.to_ds_config()  # the pipeline cuts the batch into micro-batches, so nothing else accumulates
    whole.update(gradient_accumulation_steps=1, train_micro_batch_size_per_gpu=plan.batch.rows)
    counts = EngineCounts(plan.batch.gradient_accumulation_steps)
    given = GivenOptimizer(counts) if make is None else make(plan, counts)
    if given.counts.scheduler is not None and type(given.counts.scheduler) is not ConfigScheduler:
        whole.pop("scheduler", None)
    plain = from_ds_config(whole, parts.data.size, group=parts.data, lr=lr, warn=True)
    rule = given.rule or plain.optimizer
    if rule is None:
        raise ValueError("config: it names no optimizer, and none is given")
    strategy = compose(
        plain.transform, parts.transform(plan.batch.gradient_accumulation_steps), LossShare.of(plain).transform()
    )
    engine = PipelineEngine(module, plan, parts, strategy(train_step(parts.stages, rule)), given)
    if training_data is not None:
        rows, data = plan.batch.train_micro_batch_size_per_gpu, parts.data

        def loader(shuffle: bool) -> EngineLoader:
            sampler: Any = DistributedSampler(training_data, data.size, data.rank, shuffle=shuffle)
            return data_loader(training_data, rows, collate_fn=collate_fn, drop_last=True, sampler=sampler)

        engine.training_dataloader, ordered = loader(True), loader(False)
        engine.set_dataloader(ordered)
    return engine
