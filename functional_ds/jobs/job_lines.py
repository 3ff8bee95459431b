"""On which line of a job's file an entry stands."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from functional_ds.base.files import read_text

from .job_errors import JobError

__all__ = ["line_of", "located"]

_HEADER = re.compile(r"^\s*\[\[?([^\]=]+)\]\]?\s*(?:#.*)?$")
_QUOTES = re.compile(r"[\"'\s]")


@contextmanager
def located(file: str | None) -> Iterator[None]:
    """Errors of a job that are raised within name its file, and the line of the entry if it is found there."""
    try:
        yield
    except JobError as error:
        if file is None or error.file is not None:
            raise
        raise error.at(file, _line(Path(file), error.entry)) from error.__cause__


def _line(file: Path, entry: str) -> int | None:
    if not entry or file.suffix == ".py" or not file.is_file():
        return None
    return line_of(read_text(file), entry)


def line_of(text: str, entry: str) -> int | None:
    """The line of a TOML or JSON file on which an entry stands; None if it is not found.

    Of the entry's parts, those that a table's header has are looked for there, the others one after the other behind it.

    >>> line_of("steps = 3\\n[data]\\nrows = 4\\n", "data.rows")
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
