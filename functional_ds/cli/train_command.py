"""``functional-ds train``: runs a job file."""

import importlib
import importlib.util
from typing import Annotated, Any

import typer

from .words.errors_in_one_line import CommandError
from .words.pages import emit

__all__ = ["train"]


def train(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job: a .toml, .json or .py file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Run a training job from one file.

    \b
    Examples:
      functional-ds train job.toml
      torchrun --nproc-per-node 8 -m functional_ds.cli.entry train job.toml
    """
    name = "functional_ds.jobs"
    if importlib.util.find_spec(name) is None:
        raise CommandError(f"train: this installation has no {name}, which reads and runs job files")
    jobs: Any = importlib.import_module(name)
    found = jobs.run_job(jobs.load_job(job))
    if as_json or found is not None:
        emit([str(found)], {"job": job, "result": found}, as_json=as_json)
    return 0
