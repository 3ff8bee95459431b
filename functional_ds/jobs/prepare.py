"""``prepare``: what a rank trains with, made from a job."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.fitting.checkpoints import Checkpoints
from functional_ds.fitting.fit import fit
from functional_ds.fitting.loggers import CsvLog, Logger, Logging, StepMeasure, TensorBoard, WandB
from functional_ds.fitting.non_finite import OnNonFinite, RollBack, Stop
from functional_ds.fitting.run import Evaluation
from functional_ds.fitting.signals import Flag
from functional_ds.jobs.entries.job_errors import JobError
from functional_ds.jobs.entries.job_text import located
from functional_ds.modules.functional import Apply
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

from .job import Job
from .job_data import TokenText, text_of
from .job_subject import OwnBatches, known_tokens, subject_of

Batch = Any


@attrs.frozen(eq=False)
class PreparedJob:
    """What a rank trains with; ``fit`` trains.

    Attributes:
        job: what it is made from.
        apply: the model as a function of its params.
        step: the training step, with the job's strategy.
        text: the source of rows.
        device: of this rank.
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
        """The initial state, and which of a batch's rows are this rank's. Frees the given params.

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
        drawn = self.text.batch(split, index, rows=rows, context=data.context, seed=self.job.seed, first_row=place * rows)
        if not isinstance(self.text, OwnBatches):
            drawn = dict(zip(("input_ids", "shift_labels"), drawn, strict=True))
        return tree.map(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, drawn)

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Where and when ``fit`` saves."""
        saved = dict(self.job.checkpoints or {})  # the entries are the record's fields
        return Checkpoints(saved.pop("folder"), **saved | {"keep_last": saved["keep_last"] or None}) if saved else None

    def validation(self, state: State) -> dict[str, Tensor]:
        """The mean loss of the held-out batches, each token counted once."""
        count = 4 if self.job.evaluation is None else self.job.evaluation.batches
        if not self._held_out:
            self._held_out.extend(self.batch("validation", index) for index in range(count))
        return {"validation": torch.stack([self.step.evaluate(state, batch) for batch in self._held_out]).mean()}

    def fit(self, state: State, *, loggers: Sequence[Logger] = (), stop: Flag | None = None) -> State:
        """Trains with the job's steps, evaluations, checkpoints, logs and profile.

        Args:
            state: from ``init``; it is donated.
            loggers: further ones, on rank 0.
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
    """Makes what this rank trains with from a job.

    Args:
        job: what to train, and how.
        after: one more transform, after those of the job.

    Raises:
        JobError: an entry names something that raises an error; the number of ranks is not the job's.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "text").write_text("to be or not to be " * 10)
    ...     model = {"torch.nn:Embedding": {"num_embeddings": 256, "embedding_dim": 256}}
    ...     data = {"files": [f"{folder}/text"], "rows": 4, "context": 8}
    ...     prepared = prepare(Job(model=model, data=data, steps=1, optimizer={"sgd": 1.0}, strategy=[{"clip": 1.0}]))
    >>> prepared.step
    Step(train_step(...) -> clip(1.0))
    >>> prepared.init().params["weight"].shape
    torch.Size([256, 256])
    """
    with located(job.file):
        return _prepared(job, after)


def _prepared(job: Job, after: Transform | None) -> PreparedJob:
    world = comm.world()
    if job.mesh and world.size != job.world_size:
        raise JobError(f"the mesh has {job.world_size} ranks, and there are {world.size}", entry="mesh", value=job.mesh)
    device = device_of(job, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    subject = subject_of(job, device=device)
    text = subject.batches or text_of(job)
    module: nn.Module = subject.apply.module
    loss: Any = subject.loss

    def explained(params: dict[str, Tensor], batch: Batch) -> Any:
        with located(job.file), _explained(job, module, text):
            return loss(params, batch)

    subject = attrs.evolve(subject, loss=explained).piped_for(job)
    step = subject.step(job)
    return PreparedJob(job, subject.apply, step if after is None else after(step), text, device, params=subject.params)


@contextmanager
def _explained(job: Job, model: nn.Module, text: Any) -> Iterator[None]:
    """A context that explains errors about tokens outside of the model's vocabulary."""
    try:
        yield
    except IndexError as error:
        highest = (
            max(int(text.train.max()), int(text.validation.max())) if isinstance(text, TokenText) else "what data.text gives"
        )
        problem = f"{error}; the tokens go up to {highest}, and the model's largest embedding has {known_tokens(model)} rows"
        raise JobError(problem, entry=f"model.{job.model.name}", value=job.model.arguments) from error


def device_of(job: Job, ranks: int) -> str:
    """The device of ranks: GPUs if a host has one for each of its ranks."""
    return job.device if job.device != "auto" else "cuda" if torch.cuda.device_count() >= ranks else "cpu"


def _loggers(job: Job) -> list[Logger]:
    loggers: dict[str, Callable[[Any], Logger]] = {"csv": CsvLog, "tensorboard": TensorBoard, "wandb": WandB}
    return [make(place) for name, make in loggers.items() if (place := getattr(job.logs, name)) is not None]


def _profiling(job: Job, device: str) -> StepMeasure | None:
    if job.profile is None:
        return None
    profiling, settings = import_module("functional_ds.profiling"), dict(job.profile)  # the entries are the record's fields
    if settings["peak"] == "measured":
        settings["peak"] = profiling.peak_flops(torch.float32, device)
    measure: StepMeasure = profiling.Profiling(tokens=lambda batch: batch["input_ids"].numel(), **settings)
    return measure
