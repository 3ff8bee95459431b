"""The strategy of a job: its transforms composed, its optimizer, and its sizes by axis."""

import math
from importlib import import_module
from pathlib import Path
from typing import Any

from functional_ds import comm
from functional_ds.jobs.entries.job_errors import JobError, within
from functional_ds.step.compose import compose
from functional_ds.step.step import Transform

from .job import Job
from .job_model import pipeline_schedule
from .resolve import Surroundings, made

AXES = ("dp", "pp", "sp", "tp", "ep")  # ep is within dp, whose other ranks are edp
_BESIDE = ("pipeline", "sequence", "experts", "tensor_parallel")  # transforms of the axes other than dp


def size(job: Job, axis: str) -> int:
    """The ranks of one of ``AXES``.

    >>> job = Job(model="a:B", steps=1, optimizer={"sgd": 0.1}, mesh={"edp": 2, "ep": 2, "tp": 3})
    >>> [size(job, axis) for axis in AXES]
    [4, 1, 1, 3, 2]
    """
    if axis == "dp":
        return math.prod(job.mesh.get(name, 1) for name in ("dp", "edp", "ep")) if job.mesh else job.world_size
    return job.mesh.get(axis, 1)


def group_size(job: Job, group: str | list[str] | None) -> int:
    """The ranks of a group that an argument names; None for all."""
    names = [] if group is None else group.split(",") if isinstance(group, str) else group
    return math.prod(job.mesh.get(name.strip(), 1) for name in names) if names else job.world_size


def data_axes(job: Job) -> tuple[str, ...]:
    """The axes of the mesh over which gradients are summed."""
    return tuple(name for name in ("dp", "edp", "ep", "sp") if name in job.mesh)


def micro_batches(job: Job) -> int:
    """Of a rank's step."""
    pipeline, accumulate = job.transform("pipeline"), job.transform("accumulate")
    if pipeline is not None:
        return int(pipeline.arguments["micro_batches"])
    if job.deepspeed is not None:
        return int(deepspeed_plan(job).batch.gradient_accumulation_steps)
    return 1 if accumulate is None else int(accumulate.arguments["k"])


def rows_of_rank(job: Job) -> int:
    """What a rank passes to a step: the rows of all its micro-batches."""
    return job.data.rows // size(job, "dp")


def schedule_of(job: Job) -> Any:
    """The schedule of a job's pipeline; None without one.

    Raises:
        JobError: no schedule has this name, so many stages per rank, or so few micro-batches.
    """
    call = job.transform("pipeline")
    if call is None:
        return None
    given = call.arguments
    ranks = group_size(job, given["group"]) if "group" in given else max(comm.world().size, job.world_size)
    with within("strategy.pipeline"):
        return pipeline_schedule(
            given["schedule"], given["micro_batches"], ranks=ranks, stages_per_rank=given.get("stages_per_rank")
        )


def strategy_of(job: Job, around: Surroundings) -> tuple[Transform, Any]:
    """All transforms of a job, composed, and its optimizer.

    Raises:
        JobError: an entry names something that raises an error.
    """
    optimizer = None if job.optimizer is None else made(job.optimizer, "optimizer", job, entry="optimizer")
    subject = around.subject
    given = {} if subject is None else {"pipeline": {"stages": subject.stages}, "sequence": subject.sequence or {}}
    calls = job.strategy
    transforms: list[Transform] = [
        made(call, "transform", job, entry="strategy", around=around, **given.get(call.name, {})) for call in calls
    ]
    if job.deepspeed is not None:
        plan = deepspeed_plan(job, around)
        if plan.optimizer is not None and optimizer is not None:
            raise JobError("the DeepSpeed config names one, too; keep one of the two", entry="optimizer")
        if plan.schedule is not None and job.schedule is not None:
            raise JobError("the DeepSpeed config names one, too; keep one of the two", entry="schedule")
        if plan.optimizer is None and optimizer is None:
            raise JobError("the DeepSpeed config names none, so the job must", entry="optimizer")
        place = next((index for index, call in enumerate(calls) if call.name in _BESIDE), len(transforms))
        transforms.insert(place, plan.transform)
        optimizer = plan.optimizer or optimizer
    if job.schedule is not None:
        schedule = import_module("functional_ds.transforms").schedule
        transforms.append(schedule(made(job.schedule, "schedule", job, entry="schedule")))
    return compose(*transforms), optimizer


def deepspeed_plan(job: Job, around: Surroundings | None = None) -> Any:
    """The plan of a job's DeepSpeed config, with rows counted over dp and sp.

    Args:
        job: with such a config.
        around: on a rank, its mesh; None if there are no ranks yet.

    Raises:
        JobError: the config is unsupported, or its rows are not the job's.
    """
    settings = job.deepspeed
    if settings is None:
        raise JobError("the job has none", entry="deepspeed")
    deepspeed = import_module("functional_ds.deepspeed")
    if job.mesh and not {"dp", "edp"} & job.mesh.keys():
        raise JobError("a DeepSpeed config needs an axis dp, whose ranks have rows of their own", entry="mesh", value=job.mesh)
    sp, group = size(job, "sp"), None
    if around is not None:
        group = comm.world() if around.mesh is None else around.mesh[data_axes(job)]
    ranks = size(job, "dp") * sp if group is None else group.size
    rate = None if job.optimizer is None else job.optimizer.arguments.get("lr")
    auto = {"train_batch_size": job.data.rows * sp, **settings.auto}
    config, shown = settings.config, settings.config if isinstance(settings.config, str) else "the table"
    with within("deepspeed.config", value=shown):
        plan = deepspeed.from_ds_config(
            Path(job.folder, config) if isinstance(config, str) else config, ranks, auto=auto, group=group, lr=rate
        )
    if plan.batch.train_batch_size != job.data.rows * sp:
        raise JobError(
            f"the DeepSpeed config's batch has {plan.batch.train_batch_size} rows; make the two equal",
            entry="data.rows",
            value=job.data.rows,
        )
    return plan
