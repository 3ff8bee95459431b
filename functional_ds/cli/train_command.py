"""``functional-ds train``: runs a job file."""

import importlib
import importlib.util
import os
from typing import Annotated, Any

import typer

from functional_ds.base.disk.files import parse_json

from .words.errors_in_one_line import CommandError
from .words.pages import emit

_JOBS = "functional_ds.jobs"  # may be left out of an installation


def train(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job: a .toml, .json or .py file.")],
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="An entry to replace.")] = None,
    allow_import: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A module that the job may name beyond its folder, torch.nn and this library."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, at the end.")] = False,
) -> int:
    """Run a training job from a file; exit code 130 if it was interrupted.

    \b
    Examples:
      functional-ds train job.toml
      functional-ds train job.toml --set steps=10 --set data.context=64
      torchrun --nproc-per-node 8 -m functional_ds.cli.entry train job.toml
    """
    if importlib.util.find_spec(_JOBS) is None:
        raise CommandError(f"train: this installation has no {_JOBS}, which reads and runs job files")
    jobs: Any = importlib.import_module(_JOBS)
    result = jobs.run_job(
        jobs.load_job(job, _changes(changes or []), allow_import=allow_import or []), say=None if as_json else print
    )
    if os.environ.get("RANK", "0") == "0":
        emit([str(result)], {"job": job, **result.to_dict()}, as_json=as_json)
    return 130 if result.interrupted else 0


def _changes(words: list[str]) -> dict[str, Any]:
    """Values by path; what is not JSON is a string."""
    changes: dict[str, Any] = {}
    for word in words:
        path, equals, text = word.partition("=")
        if not path or not equals:
            raise CommandError(f"--set: {word!r} should be path=value, such as data.context=64")
        try:
            changes[path] = parse_json(text)
        except ValueError:
            changes[path] = text
    return changes
