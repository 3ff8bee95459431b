"""``run_job``: starts a job's ranks, or runs as one of them, and trains."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import torch

from functional_ds import comm
from functional_ds.fitting.run import Interrupted
from functional_ds.fitting.signals import Flag, stop_on_signals, stop_ranks_on_signals
from functional_ds.jobs.entries.job_errors import JobError, within
from functional_ds.jobs.entries.job_text import located

from .job import Job
from .job_data import text_of
from .job_subject import loss_function
from .prepare import device_of, prepare
from .resolve import Surroundings, function_and_arguments
from .strategy import strategy_of

Found = TypeVar("Found")


@attrs.frozen
class JobResult:
    """The result of a run, on rank 0.

    Attributes:
        done: the number of steps made, earlier runs included.
        losses: by the number of steps made, of this run's logged steps.
        validation: by the number of steps made, this run's validation losses.
        interrupted: whether a signal ended it early, after its checkpoint was written.

    >>> print(JobResult(100, losses={10: 2.5, 100: 1.25}, validation={}))
    100 steps, loss 2.5000 -> 1.2500
    """

    done: int
    losses: dict[int, float]
    validation: dict[int, float]
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return attrs.asdict(self)

    def __str__(self) -> str:
        curve = self.validation or self.losses
        name = "validation loss" if self.validation else "loss"
        change = "" if not curve else f", {name} {next(iter(curve.values())):.4f} -> {next(reversed(curve.values())):.4f}"
        return f"{'interrupted after ' * self.interrupted}{self.done} steps{change}"


@attrs.define(eq=False)
class _Losses:
    """A logger that records losses, and prints them if asked to."""

    say: Callable[[str], None] | None
    losses: dict[int, float] = attrs.field(factory=dict)
    validation: dict[int, float] = attrs.field(factory=dict)

    def begin(self, done: int) -> None:
        for kept in (self.losses, self.validation):
            for step in [step for step in kept if step > done]:
                del kept[step]
        if done and self.say is not None:
            self.say(f"going on after step {done}")

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        if "validation" in numbers:
            self.validation[done] = numbers["validation"]
        else:
            self.losses[done] = numbers["loss"]
        if self.say is not None:
            shown = ((name, numbers[name]) for name in ("loss", "validation", "grad_norm", "rate") if name in numbers)
            seconds = f"   {numbers['seconds_per_step']:.3f} s" if "seconds_per_step" in numbers else ""
            self.say(f"step {done:>6}   " + "   ".join(f"{name} {value:.4f}" for name, value in shown) + seconds)

    def close(self) -> None:
        pass


def run_job(job: Job, *, stop: Flag | None = None, say: Callable[[str], None] | None = None) -> JobResult:
    """Trains a job, on ranks that it starts or on existing ones.

    | where it is called | its ranks |
    |---|---|
    | under torchrun | torchrun's |
    | in a world of several ranks, as within ``comm.simulate`` | those |
    | with ``simulate = true`` | simulated ones in this process |
    | otherwise | processes on this machine; this one if there is one rank |

    Law: up to rounding, the losses do not depend on the number of ranks or on how they were started; for equal numbers of ranks
    they are bitwise equal. Called again with checkpoints, it resumes, bitwise, where it ended.

    Args:
        job: from ``load_job``, or built in Python.
        stop: a flag that ends the run after the current step, instead of SIGINT and SIGTERM; if ranks are processes, one that
            they share.
        say: is called on rank 0 with a line for each logged number, such as ``print``; a function that can be pickled.

    Raises:
        JobError: an entry is invalid, before any rank starts if possible.
        CheckpointError: the checkpoints are another run's, or cannot be written.
        RankFailedError: a rank has died.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "text").write_text("to be or not to be " * 10)
    ...     model = {"torch.nn:Embedding": {"num_embeddings": 256, "embedding_dim": 256}}  # logits of the next byte
    ...     data = {"files": [f"{folder}/text"], "rows": 4, "context": 8}
    ...     job = Job(model=model, data=data, steps=3, optimizer={"sgd": 9.0}, ranks=2, simulate=True, logs={"every": 1})
    ...     print(run_job(job))
    3 steps, loss ... -> ...
    """
    return run_ranks(job, _train, say, stop=stop)


def _train(job: Job, say: Callable[[str], None] | None, stop: Flag) -> JobResult:
    """What each rank runs."""
    prepared = prepare(job)
    losses = _Losses(say)
    try:
        state = prepared.fit(prepared.init(), loggers=[losses], stop=stop)
    except Interrupted as end:
        return JobResult(end.done, losses.losses, losses.validation, interrupted=True)
    del state
    return JobResult(job.steps, losses.losses, losses.validation)


def run_ranks(job: Job, program: Callable[..., Found], *args: Any, stop: Flag | None = None) -> Found:
    """Runs ``program(job, *args, stop)`` on all ranks of a job, for custom training loops; returns rank 0's result.

    Under torchrun, and in an existing world, it returns this rank's result.

    Args:
        job: defines the ranks; it is checked first.
        program: gets the job, ``args`` and a flag that is set when it must end. If ranks are processes it must be importable.
        args: further arguments.
        stop: your own flag; by default SIGINT and SIGTERM set one.

    Raises:
        JobError: an entry is invalid.
        Interrupted: a second signal came while processes were stopping.

    >>> job = Job(model="torch.nn:Identity", steps=1, optimizer={"sgd": 1.0}, ranks=2, simulate=True)
    >>> run_ranks(job, lambda job, stop: comm.all_gather_object((comm.world().rank, stop.is_set())))
    [(0, False), (1, False)]
    """
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    with _signals(stop, spawns=not (_in_a_world() or launched or job.simulate or job.world_size == 1)) as flag:
        if _in_a_world():
            return program(job, *args, flag)
        check_job(job, int(os.environ["WORLD_SIZE"]) if launched else None)
        if launched:
            return _under_torchrun(job, program, *args, flag)
        job = _placed(job, 1 if job.simulate else job.world_size)
        if job.simulate:
            return comm.simulate(_run, program, job, args, flag, world_size=job.world_size)[0]
        if job.world_size == 1:
            return program(job, *args, flag)
        try:
            return comm.spawn(_run, program, job, args, flag, world_size=job.world_size, backend=_backend(job))[0]
        except comm.errors.RankFailedError as error:
            if flag.is_set():
                raise Interrupted(signal.SIGINT, 0) from error  # interrupted again, while it was stopping
            raise


def _run(program: Callable[..., Found], job: Job, args: tuple[Any, ...], stop: Flag) -> Found:
    return program(job, *args, stop)


@contextmanager
def _signals(stop: Flag | None, *, spawns: bool) -> Iterator[Flag]:
    """The user's flag, or one that signals set."""
    if stop is not None:
        yield stop
        return
    with stop_ranks_on_signals() if spawns else stop_on_signals() as flag:
        yield flag


def _in_a_world() -> bool:
    return comm.world().size > 1 or torch.distributed.is_initialized()


def _under_torchrun(job: Job, program: Callable[..., Found], *args: Any) -> Found:
    if job.simulate:
        raise JobError("torchrun has started the ranks; leave simulate out", entry="simulate", value=True)
    job = _placed(job, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    comm.init_distributed(_backend(job))
    try:
        return program(job, *args)
    finally:
        torch.distributed.destroy_process_group()


def _placed(job: Job, ranks: int) -> Job:
    return job.changed({"device": device_of(job, ranks)})


def _backend(job: Job) -> str | None:
    return "gloo" if job.device == "cpu" else None


def check_job(job: Job, ranks: int | None = None) -> None:
    """Raises an error for a job that no rank could train, on its number of ranks, or torchrun's.

    It imports the modules that the job names, builds its optimizer, schedule and transforms, and reads its text, unless that is
    tokenized or comes from a data set. It does not build the model.

    Raises:
        JobError: with the entry, its value, and what to do instead.

    >>> check_job(Job(model="nowhere:MLP", steps=1, optimizer={"sgd": 0.1}))
    Traceback (most recent call last):
        ...
    functional_ds.jobs.entries.job_errors.JobError: model.nowhere:MLP: there is no module 'nowhere', neither in . nor installed
    """

    def tried() -> None:
        strategy_of(job, Surroundings(comm.mesh(**job.mesh) if job.mesh else None))

    with located(job.file):
        for entry, kind, call in (("model", "model", job.model), ("data.text", "text", job.data.text)):
            if call is not None:
                with within(f"{entry}.{call.name}"):
                    function_and_arguments(call, kind, job, Surroundings())
        loss_function(job)
        size = job.world_size if ranks is None else ranks
        if job.mesh and job.world_size != size:
            raise JobError(f"the mesh has {job.world_size} ranks, and there are {size}", entry="mesh", value=job.mesh)
        comm.simulate(tried, world_size=size, shapes_only=True)
        if not (job.data.dataset or job.data.tokenizer or job.data.text):
            text_of(job)
