"""Training jobs from one file: data, model, mesh, strategy, optimizer, schedule, evaluation, checkpoints, logs, profile.

``load_job`` reads a job, ``run_job`` trains; ``run_ranks`` and ``prepare`` are for custom training loops.
"""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from .entries.call_entry import CallEntry
    from .entries.job_errors import JobError
    from .job import DataEntry, DeepSpeedEntry, EvaluationEntry, Job, LogsEntry, ProfileEntry, SavedEntry
    from .job_data import TokenText
    from .job_file import load_job
    from .prepare import PreparedJob, prepare
    from .run_job import JobResult, check_job, run_job, run_ranks

__all__ = [
    "CallEntry",
    "DataEntry",
    "DeepSpeedEntry",
    "EvaluationEntry",
    "Job",
    "JobError",
    "JobResult",
    "LogsEntry",
    "PreparedJob",
    "ProfileEntry",
    "SavedEntry",
    "TokenText",
    "check_job",
    "load_job",
    "prepare",
    "run_job",
    "run_ranks",
]

lazy_index(__name__)
