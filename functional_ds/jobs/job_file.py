"""``load_job``: a job from a TOML, JSON or Python file."""

import json
import os
import re
import runpy
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .job import Job
from .job_errors import JobError
from .job_reader import changed, read

__all__ = ["line_of", "load_job"]


def load_job(path: str | os.PathLike[str], changes: Mapping[str, Any] | None = None) -> Job:
    """The job that a file describes.

    A ``.toml`` or ``.json`` file has the entries of ``Job``. A ``.py`` file has a ``job``, a ``Job`` or a table of entries.

    Law: the job of a file with ``job.to_toml()`` is ``job``.

    Args:
        path: the file.
        changes: by path, values in the place of the file's, as ``Job.changed`` takes them: ``{"data.context": 64}``.

    Raises:
        JobError: there is no such file, it is no TOML or JSON, or an entry is refused: it names the file, the line, the
            entry, its value, and what would do.
    """
    file = Path(path)
    if not file.is_file():
        raise JobError("there is no such file" if not file.exists() else "it is no file", file=str(file))
    readers = {".toml": _toml, ".json": _json, ".py": _python}
    if file.suffix not in readers:
        raise JobError(f"a job's file ends in {', '.join(readers)}", file=str(file))
    text = file.read_text(encoding="utf-8")
    data = readers[file.suffix](file, text)
    try:
        if isinstance(data, Mapping):
            data = {"folder": str(file.parent), **data}
        job: Job = read(Job, data)
        if changes:
            plain_data = job.to_dict()
            for name, value in changes.items():
                changed(plain_data, name, value)
            job = read(Job, plain_data)
        return job
    except JobError as error:
        raise error.at(str(file), line_of(text, error.entry) if error.entry and file.suffix != ".py" else None) from None


def _toml(file: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"it is no TOML: {error}", file=str(file)) from None


def _json(file: Path, text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
        if twice:
            raise JobError("it occurs twice in one table; keep one", entry=twice[0], file=str(file))
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise JobError(f"it is no JSON: {error.msg}", file=str(file), line=error.lineno) from None


def _python(file: Path, text: str) -> Any:
    found = runpy.run_path(str(file)).get("job")
    if not isinstance(found, Job | Mapping):
        raise JobError("it must set `job` to a Job, or to a table of entries", entry="job", value=found, file=str(file))
    return found


_HEADER = re.compile(r"^\s*\[\[?([^\]=]+)\]\]?\s*(?:#.*)?$")
_QUOTES = re.compile(r"[\"'\s]")


def line_of(text: str, entry: str) -> int | None:
    """The line of a TOML or JSON file on which an entry stands; None if it is not found.

    Of the entry's parts, those that a table's header has are looked for there, the others one after the other behind it.

    >>> line_of('steps = 3\\n[data]\\nrows = 4\\n', "data.rows")
    3
    """
    lines = text.splitlines()
    best, depth = 0, 0
    for number, line in enumerate(lines):
        header = _HEADER.match(line)
        name = _QUOTES.sub("", header[1]) if header else ""
        if header and (entry == name or entry.startswith(f"{name}.")) and len(name) > depth:
            best, depth = number, len(name)
    rest = entry[depth:].lstrip(".")
    found = best if depth else None
    while rest:
        # a key with dots of its own is looked for before its first part
        parts = [rest[: match.start()] for match in re.finditer(r"\.", rest)]
        for name in [rest, *reversed(parts)]:
            place = _key_line(lines, name, best, until_header=bool(depth) or not _is_table(lines, name))
            if place is not None:
                found, best, rest = place, place, rest[len(name) :].lstrip(".")
                break
        else:
            rest = rest.partition(".")[2]
    return None if found is None else found + 1


def _is_table(lines: list[str], name: str) -> bool:
    return any(_QUOTES.sub("", match[1]).split(".")[0] == name for match in map(_HEADER.match, lines) if match)


def _key_line(lines: list[str], name: str, start: int, *, until_header: bool) -> int | None:
    key = re.compile(rf"(?<![\w.]){re.escape(name)}[\"']?\s*[=:.]")
    for number in range(start, len(lines)):
        if until_header and number > start and _HEADER.match(lines[number]):
            return None
        if key.search(lines[number].partition("#")[0]):
            return number
    return None
