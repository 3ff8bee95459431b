"""``prepare``: what a rank trains with, made of a job."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.fitting.checkpoints import Checkpoints
from functional_ds.fitting.fit import fit
from functional_ds.fitting.loggers import CsvLog, Logger, Logging, StepMeasure, TensorBoard, WandB
from functional_ds.fitting.non_finite import OnNonFinite, RollBack, Stop
from functional_ds.fitting.run import Evaluation
from functional_ds.fitting.signals import Flag
from functional_ds.modules.deferred_init import deferred
from functional_ds.modules.functional import Apply, functional
from functional_ds.step.compose import compose
from functional_ds.step.state import State
from functional_ds.step.step import Step, Transform
from functional_ds.step.train_step import train_step

from .call_entry import CallEntry, parameters_of
from .job import Job
from .job_data import text_of
from .job_errors import JobError, within
from .job_lines import located
from .job_model import pipeline_schedule
from .resolve import Surroundings, function_and_arguments, made
from .token_text import TokenText

__all__ = ["PreparedJob", "device_of", "prepare"]

Batch = dict[str, Tensor]


@attrs.frozen(eq=False)
class PreparedJob:
    """What a rank trains with; ``fit`` trains.

    Attributes:
        job: what it is made of.
        apply: the model as a function of its params.
        step: the training step, with the job's strategy.
        text: where rows come from.
        device: where this rank computes.
    """

    job: Job
    apply: Apply
    step: Step
    text: Any
    device: str
    _params: dict[str, Tensor] = attrs.field(alias="params", repr=False)
    _shard: list[tuple[int, int]] = attrs.field(factory=list, init=False, repr=False)
    _held_out: list[Batch] = attrs.field(factory=list, init=False, repr=False)

    def init(self) -> State:
        """The state to begin with, and which of a batch's rows are this rank's. The params given go.

        Raises:
            JobError: the rows do not divide among ranks and micro-batches.
        """
        state = self.step.init(self._params)
        self._params.clear()
        index, count = self.step.batch_shard(state)
        parts = count * self.step.micro_batches(state)
        if self.job.data.rows % parts:
            problem = f"the rows do not divide among {count} ranks x {parts // count} micro-batches; use a multiple of {parts}"
            with located(self.job.file):
                raise JobError(problem, entry="data.rows", value=self.job.data.rows)
        self._shard[:] = [(index, count)]
        return state

    def batch(self, split: str, index: int) -> Batch:
        """This rank's rows of a global batch, which is the same on any number of ranks."""
        place, count = self._shard[0]
        data, rows = self.job.data, self.job.data.rows // count
        x, y = self.text.batch(split, index, rows=rows, context=data.context, seed=self.job.seed, first_row=place * rows)
        return {"input_ids": x.to(self.device), "shift_labels": y.to(self.device)}

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Where and when ``fit`` saves."""
        saved = self.job.checkpoints
        if saved is None:
            return None
        return Checkpoints(
            Path(saved.folder),
            every=saved.every,
            minutes=saved.minutes,
            keep_last=saved.keep_last or None,
            keep_every=saved.keep_every,
            resume=saved.resume,
        )

    def validation(self, state: State) -> dict[str, Tensor]:
        """The mean loss of the held-out batches, each token counted once."""
        count = 4 if self.job.evaluation is None else self.job.evaluation.batches
        if not self._held_out:
            self._held_out.extend(self.batch("validation", index) for index in range(count))
        return {"validation": torch.stack([self.step.evaluate(state, batch) for batch in self._held_out]).mean()}

    def fit(self, state: State, *, loggers: Sequence[Logger] = (), stop: Flag | None = None) -> State:
        """Trains as the job says: its steps, evaluations, checkpoints, logs and profile.

        Args:
            state: from ``init``; it is donated.
            loggers: more of them, on rank 0.
            stop: a flag that ends the run after the current step.
        """
        job, profile = self.job, _profiling(self.job, self.device)
        non_finite: dict[str, OnNonFinite] = {"stop": Stop(after=3), "roll_back": RollBack(after=3), "ignore": None}
        evaluation = None if job.evaluation is None else Evaluation(self.validation, every=job.evaluation.every)
        return fit(
            self.step,
            state,
            lambda index: self.batch("train", index),
            steps=job.steps,
            checkpoints=self.checkpoints,
            evaluation=evaluation,
            logging=Logging((*_loggers(job), *loggers), every=job.logs.every, progress=job.logs.progress, profile=profile),
            on_non_finite=non_finite[job.on_non_finite],
            timeout=timedelta(minutes=job.timeout) if job.timeout else None,
            stop=stop,
        )


def prepare(job: Job, *, after: Transform | None = None) -> PreparedJob:
    """What this rank trains with.

    Args:
        job: what to train, and how.
        after: one more transform, behind those of the job.

    Raises:
        JobError: an entry is refused by what it names; the ranks are not the job's.
    """
    with located(job.file):
        return _prepared(job, after)


def _prepared(job: Job, after: Transform | None) -> PreparedJob:
    world = comm.world()
    if job.mesh and world.size != job.world_size:
        raise JobError(f"the mesh has {job.world_size} ranks, and there are {world.size}", entry="mesh", value=job.mesh)
    text, device = text_of(job), device_of(job)
    with _seeded(job.seed):
        built = deferred(lambda: model_of(job), device=device) if job.deferred else None
        model = built[0].module if built else model_of(job).to(device)
    around = Surroundings(comm.mesh(**job.mesh) if job.mesh else None, model)
    loss = BatchLoss(model, loss_function(job))
    pipelined = next((each for each in job.strategy if each.name == "pipeline"), None)
    if pipelined is None:
        stages, (apply, params) = None, built or functional(model)
    else:
        stages, params = stages_of(job, pipelined, around, model, loss)
        apply = stages.apply

    def whole_loss(params: dict[str, Tensor], batch: Batch) -> Any:
        with located(job.file), _explained(job, model, text):
            given = loss.inputs(batch)
            return loss.of_output(apply(params, **given) if isinstance(given, dict) else apply(params, given), batch)

    strategy, optimizer = strategy_of(job, around, stages)
    step = strategy(train_step(whole_loss if stages is None else stages, optimizer, seed=job.seed))
    return PreparedJob(job, apply, step if after is None else after(step), text, device, params=params)


@attrs.frozen(eq=False)
class BatchLoss:
    """What a model gets of a batch, and the loss of what it returns.

    Attributes:
        model: for the names of its inputs.
        function: from logits and targets to a loss.
    """

    model: nn.Module
    function: Callable[[Any, Tensor], Any]

    def inputs(self, batch: Batch) -> Any:
        """Keyword arguments for a model that has ``input_ids``, else the tokens alone."""
        names = parameters_of(self.model.forward)
        found = {name: leaf for name, leaf in batch.items() if name in names and name != "shift_labels"}
        return found if "input_ids" in names else batch["input_ids"]

    def of_output(self, output: Any, batch: Batch) -> Any:
        """The loss; logits are the output, or an attribute of it."""
        return self.function(getattr(output, "logits", output), batch["shift_labels"])


def stages_of(
    job: Job, call: CallEntry, around: Surroundings, model: nn.Module, loss: BatchLoss
) -> tuple[Any, dict[str, Tensor]]:
    """The model cut into as many stages as a pipeline's schedule has, and its params."""
    if job.deferred:
        raise JobError("a pipeline's stages are cut from a whole model; leave one of the two out", entry="deferred", value=True)
    with within(f"strategy.{call.name}"):
        _, found = function_and_arguments(call, "transform", job, around)
        group = found.get("group") or comm.world()
        schedule = pipeline_schedule(
            found["schedule"],
            found["micro_batches"],
            ranks=group.size,
            stages_per_rank=found.get("stages_per_rank"),
        )
        tokens = torch.zeros(2, job.data.context, dtype=torch.int64, device=next(model.parameters()).device)
        options = {name: found[name] for name in ("by", "blocks") if name in found}
        try:
            stages, params = import_module("functional_ds.pipelining").cut(
                model,
                schedule.stages,
                example={"input_ids": tokens, "shift_labels": tokens},
                inputs=loss.inputs,
                loss=loss.of_output,
                **options,
            )
        except (TypeError, ValueError) as error:
            raise JobError(str(error), value=call.arguments) from error
    return stages, params


@contextmanager
def _explained(job: Job, model: nn.Module, text: Any) -> Iterator[None]:
    """Says of tokens that the model does not know how many it knows."""
    try:
        yield
    except IndexError as error:
        known = max((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), default=0)
        highest = (
            max(int(text.train.max()), int(text.validation.max())) if isinstance(text, TokenText) else "what data.text gives"
        )
        problem = f"{error}; the tokens go up to {highest}, and the model's largest embedding has {known} rows"
        raise JobError(problem, entry=f"model.{job.model.name}", value=job.model.arguments) from error


def device_of(job: Job) -> str:
    """Where ranks compute: GPUs if there is one for each rank of a host."""
    if job.device != "auto":
        return job.device
    here = int(os.environ.get("LOCAL_WORLD_SIZE", comm.world().size))
    return "cuda" if torch.cuda.device_count() >= here else "cpu"


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's default generator begins with this seed, and is as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def model_of(job: Job) -> nn.Module:
    """The module that the job names."""
    if job.deferred and job.model.arguments.get("weights"):
        raise JobError("weights are loaded at once; leave one of the two out", entry="deferred", value=True)
    found = made(job.model, "model", job, entry="model", seed=job.seed, folder=job.folder)
    if not isinstance(found, nn.Module):
        raise JobError(f"it made a {type(found).__name__}, and must make a torch.nn.Module", entry=f"model.{job.model.name}")
    return found


def loss_function(job: Job) -> Any:
    """A function of logits and targets."""
    with within(f"loss.{job.loss.name}"):
        function, arguments = function_and_arguments(job.loss, "loss", job, Surroundings())
    return lambda logits, targets: function(logits, targets, **arguments)


def strategy_of(job: Job, around: Surroundings, stages: Any = None) -> tuple[Transform, Any]:
    """All transforms of a job, composed, and its optimizer; ``stages`` are those of a pipeline."""
    optimizer = None if job.optimizer is None else made(job.optimizer, "optimizer", job, entry="optimizer")
    found: list[Transform] = []
    if job.deepspeed is not None:
        plan = deepspeed_plan(job, around)
        if plan.optimizer is not None and optimizer is not None:
            raise JobError("the DeepSpeed config names one, too; keep one of the two", entry="optimizer")
        if plan.schedule is not None and job.schedule is not None:
            raise JobError("the DeepSpeed config names one, too; keep one of the two", entry="schedule")
        if plan.optimizer is None and optimizer is None:
            raise JobError("the DeepSpeed config names none, so the job must", entry="optimizer")
        found.append(plan.transform)
        optimizer = plan.optimizer or optimizer
    for each in job.strategy:
        given = {"stages": stages} if each.name == "pipeline" else {}
        found.append(made(each, "transform", job, entry="strategy", around=around, **given))
    if job.schedule is not None:
        schedule = import_module("functional_ds.transforms").schedule
        found.append(schedule(made(job.schedule, "schedule", job, entry="schedule")))
    return compose(*found), optimizer


def deepspeed_plan(job: Job, around: Surroundings) -> Any:
    """The plan of a job's DeepSpeed config.

    Raises:
        JobError: the config is refused, or its rows are not the job's.
    """
    settings = job.deepspeed
    if settings is None:
        raise JobError("the job has none", entry="deepspeed")
    deepspeed = import_module("functional_ds.deepspeed")
    if job.mesh and "dp" not in job.mesh:
        raise JobError("a DeepSpeed config needs an axis dp, whose ranks have rows of their own", entry="mesh", value=job.mesh)
    group = comm.world() if around.mesh is None else around.mesh["dp"]
    rate = None if job.optimizer is None else job.optimizer.arguments.get("lr")
    auto = {"train_batch_size": job.data.rows, **settings.auto}
    try:
        plan = deepspeed.from_ds_config(Path(job.folder, settings.config), group.size, auto=auto, group=group, lr=rate)
    except deepspeed.ConfigError as error:
        raise JobError(str(error), entry="deepspeed.config", value=settings.config) from error
    if plan.batch.train_batch_size != job.data.rows:
        raise JobError(
            f"the DeepSpeed config's batch has {plan.batch.train_batch_size} rows; make the two equal",
            entry="data.rows",
            value=job.data.rows,
        )
    return plan


def _loggers(job: Job) -> list[Logger]:
    logs, found = job.logs, list[Logger]()
    if logs.csv is not None:
        found.append(CsvLog(Path(logs.csv)))
    if logs.tensorboard is not None:
        found.append(TensorBoard(Path(logs.tensorboard)))
    if logs.wandb is not None:
        found.append(WandB(logs.wandb))
    return found


def _profiling(job: Job, device: str) -> StepMeasure | None:
    settings = job.profile
    if settings is None:
        return None
    profiling = import_module("functional_ds.profiling")
    peak = profiling.peak_flops(torch.float32, device) if settings.peak == "measured" else settings.peak
    found: StepMeasure = profiling.Profiling(
        skip=settings.skip,
        every=settings.every,
        keep=settings.keep,
        flops=settings.flops,
        tokens=lambda batch: batch["input_ids"].numel(),
        peak=peak,
        folder=Path(settings.folder),
    )
    return found
