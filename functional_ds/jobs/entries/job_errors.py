"""``JobError``: which entry of which file is wrong, and what to do instead."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import attrs

_NOTHING: Any = attrs.NOTHING


class JobError(ValueError):
    """A job that cannot be run.

    Attributes:
        problem: what is wrong, and what to do instead.
        entry: the entry, such as "data.context"; "" for the job as a whole.
        value: the entry's value; ``attrs.NOTHING`` if there is none to show.
        file: the job's file, if it has one.
        line: the entry's line in it, if known.
    """

    def __init__(
        self, problem: str, *, entry: str = "", value: Any = _NOTHING, file: str | None = None, line: int | None = None
    ) -> None:
        super().__init__(problem, entry, value, file, line)
        self.problem, self.entry, self.value, self.file, self.line = problem, entry, value, file, line

    def __str__(self) -> str:
        where = [] if self.file is None else [self.file if self.line is None else f"{self.file}, line {self.line}"]
        if self.entry:
            where.append(self.entry if self.value is _NOTHING else f"{self.entry} = {_shown(self.value)}")
        return ": ".join([*where, self.problem])

    def within(self, entry: str) -> "JobError":
        """The same error for an entry that contains this one."""
        return JobError(self.problem, entry=joined(entry, self.entry), value=self.value, file=self.file, line=self.line)

    def at(self, file: str, line: int | None) -> "JobError":
        """The same with its place in a file."""
        return JobError(self.problem, entry=self.entry, value=self.value, file=file, line=line)

    def __reduce__(self) -> Any:
        return partial(JobError, entry=self.entry, value=self.value, file=self.file, line=self.line), (self.problem,)


@contextmanager
def within(entry: str, *, value: Any = _NOTHING) -> Iterator[None]:
    """A context in which errors of a job get this entry's path; with its value, errors of other values become such errors."""
    try:
        yield
    except JobError as error:
        raise error.within(entry) from error.__cause__
    except (TypeError, ValueError) as error:
        if value is _NOTHING:
            raise
        raise JobError(str(error), entry=entry, value=value) from error


def joined(*parts: str) -> str:
    """The path of an entry in an entry."""
    return ".".join(part for part in parts if part)


def first_key(table: Iterable[str], path: str) -> str | None:
    """The key of a table with which a path begins; it may contain dots, as "package.module:function" has."""
    return max((key for key in table if path == key or path.startswith(f"{key}.")), key=len, default=None)


def nearest(name: str, known: Collection[str]) -> str:
    """A hint for an unknown name: the nearest known one if one is similar, and all of them."""
    if not known:
        return "it takes none"
    similar = get_close_matches(name, known, 1, 0.5)
    return f"the nearest is {similar[0]!r}, of {', '.join(known)}" if similar else f"the names are {', '.join(known)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
