"""``check_job``: all of a job that can be tried before there are ranks."""

from functional_ds import comm

from .job import Job
from .job_data import text_of
from .job_errors import JobError, within
from .job_subject import loss_function
from .job_text import located
from .resolve import Surroundings, function_and_arguments
from .strategy import strategy_of

__all__ = ["check_job"]


def check_job(job: Job, ranks: int | None = None) -> None:
    """Refuses what no rank could train with, on as many ranks as the job says, or as torchrun has started.

    It imports the modules that the job names, builds its optimizer, schedule and transforms, and reads its text, unless that
    is tokenized or comes from a data set. It does not build the model.

    Raises:
        JobError: with the entry, its value, and what would do.

    >>> check_job(Job(model="nowhere:MLP", steps=1, optimizer={"sgd": 0.1}))
    Traceback (most recent call last):
        ...
    functional_ds.jobs.job_errors.JobError: model.nowhere:MLP: there is no module 'nowhere', neither in . nor installed
    """
    with located(job.file):
        for entry, kind, call in (("model", "model", job.model), ("data.text", "text", job.data.text)):
            if call is not None:
                with within(f"{entry}.{call.name}"):
                    function_and_arguments(call, kind, job, Surroundings())
        loss_function(job)
        size = job.world_size if ranks is None else ranks
        if job.mesh and job.world_size != size:
            raise JobError(f"the mesh has {job.world_size} ranks, and there are {size}", entry="mesh", value=job.mesh)
        comm.simulate(_try_strategy, job, world_size=size, shapes_only=True)
        if not (job.data.dataset or job.data.tokenizer or job.data.text):
            text_of(job)


def _try_strategy(job: Job) -> None:
    strategy_of(job, Surroundings(comm.mesh(**job.mesh) if job.mesh else None))
