"""``load_job``: a job from a TOML, JSON or Python file."""

import json
import os
import runpy
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from functional_ds.base.disk.files import check_plain, parse_json, read_text
from functional_ds.jobs.entries.job_errors import JobError
from functional_ds.jobs.entries.job_text import located

from .job import Job, module_names


def load_job(
    path: str | os.PathLike[str], changes: Mapping[str, Any] | None = None, *, allow_import: Sequence[str] = ()
) -> Job:
    """Loads a job from a TOML, JSON or Python file.

    A ``.toml`` or ``.json`` file has the entries of ``Job``. A ``.py`` file defines ``job``, a ``Job`` or a table of entries.

    Law: the job of a file with ``job.to_toml()`` is ``job``.

    Args:
        path: the file.
        changes: by path, values instead of the file's, as for ``Job.changed``: ``{"data.context": 64}``.
        allow_import: names of modules and packages that the job may name, such as "timm", in addition to files in its folder,
            torch.nn, torch.optim and this library's transforms, optimizers and layers.

    Raises:
        JobError: there is no such file, it is not TOML or JSON, or an entry is invalid: names the file, the line, the entry,
            its value, and what to do instead.

    >>> import tempfile
    >>> toml = 'model = "models:MLP"\\nsteps = 100\\noptimizer = {adamw = 1e-3}\\nstrategy = [{zero = 2}]'
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "job.toml").write_text(toml)
    ...     job = load_job(Path(folder, "job.toml"), {"steps": 10})
    >>> job.steps, job.strategy
    (10, (CallEntry('zero', {'stage': 2}),))
    """
    file = Path(path)
    if not file.is_file():
        raise JobError("there is no such file" if not file.exists() else "it is not a file", file=str(file))
    readers = {".toml": _toml, ".json": _json, ".py": _python}
    if file.suffix not in readers:
        raise JobError(f"a job's file ends in {', '.join(readers)}", file=str(file))
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"it cannot be read: {error}", file=str(file)) from error
    with located(str(file)):
        data = readers[file.suffix](file, text)
        _check(data, file)
        if isinstance(data, Mapping):
            data = {"folder": str(file.parent), **data}
        declared = data.allow_import if isinstance(data, Job) else ()
        allowed = (*declared, *module_names(allow_import))
        job = Job.read(data.to_dict() if isinstance(data, Job) else data, file=str(file), allow_import=allowed)
        return job.changed(changes) if changes else job


def _check(data: Any, file: Path) -> None:
    try:
        check_plain(data)
    except ValueError as error:
        raise JobError(f"it cannot be read: {error}", file=str(file)) from None


def _toml(file: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise JobError("it is not TOML that can be read: its tables are nested too deeply", file=str(file)) from None
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        raise JobError(f"it is not TOML: {error}", file=str(file)) from None


def _json(file: Path, text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
        if twice:
            raise JobError("it occurs twice in one table; keep one", entry=twice[0], file=str(file))
        return dict(pairs)

    try:
        return parse_json(text, pairs=unique)
    except json.JSONDecodeError as error:
        raise JobError(f"it is not JSON: {error.msg}", file=str(file), line=error.lineno) from None


def _python(file: Path, text: str) -> Any:
    job = runpy.run_path(str(file)).get("job")
    if not isinstance(job, Job | Mapping):
        raise JobError("it must set `job` to a Job, or to a table of entries", entry="job", value=job, file=str(file))
    return job
