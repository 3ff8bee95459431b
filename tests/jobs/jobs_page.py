"""Prints the tables of a job's entries; with --write, puts them into docs/command-line.md."""

import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from functional_ds.jobs.entries.call_entry import KINDS, CallEntry
from functional_ds.jobs.entries.job_reader import Entries
from functional_ds.jobs.entries.job_text import toml
from functional_ds.jobs.job import DataEntry, DeepSpeedEntry, EvaluationEntry, Job, LogsEntry, ProfileEntry, SavedEntry

PAGE = Path(__file__).parents[2] / "docs/command-line.md"
START, END = "<!-- entries -->\n", "<!-- /entries -->"
RECORDS: dict[str, type[Entries]] = {
    "": Job,
    "data": DataEntry,
    "deepspeed": DeepSpeedEntry,
    "evaluation": EvaluationEntry,
    "checkpoints": SavedEntry,
    "logs": LogsEntry,
    "profile": ProfileEntry,
}

_WORDS = {int: "whole number", float: "number", str: "string", bool: "true, false", CallEntry: "call", Any: "anything"}


def type_of(annotation: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_of(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(type_of(each) for each in parts if each is not type(None))
    if origin is Literal:
        return ", ".join(f'"{each}"' for each in parts)
    if origin is tuple:
        return f"list: {type_of(parts[0])}"
    if origin is dict:
        return f"table: {type_of(parts[1])}"
    return _WORDS.get(annotation, "table")


def default_of(field: FieldInfo) -> str:
    """A default as it would be written."""
    if field.is_required():
        return "needed"
    if field.default in (None, {}, ()) or isinstance(field.default, Entries):
        return "-"
    value = field.default.name if isinstance(field.default, CallEntry) else field.default
    return f"`{toml({'x': value}).partition(' = ')[2].strip()}`"


def tables() -> str:
    """A table for each record, in the order of the file."""
    parts = []
    for name, record in RECORDS.items():
        head = "### The job" if not name else f"### `[{name}]`\n\n{record.__doc__}"
        rows = ["| entry | type | default | |", "|---|---|---|---|"]
        for field_name, field in record.model_fields.items():
            help = field.description
            meaning = help[0].upper() + help[1:] + "." * (help[-1] != ".")
            if field_name in RECORDS:
                meaning = f"[{meaning[:-1]}](#{field_name})."
            rows.append(f"| `{field_name}` | {type_of(field.annotation)} | {default_of(field)} | {meaning} |")
        parts.append(head + "\n\n" + "\n".join(rows) + "\n")
    names = [f"| {kind} | {', '.join(f'`{each}`' for each in found.names)} |" for kind, found in KINDS.items() if found.names]
    parts.append("### Names of calls\n\n| what | names |\n|---|---|\n" + "\n".join(names) + "\n")
    return "\n".join(parts)


def written(page: str) -> str:
    """The page with its tables renewed."""
    before, _, rest = page.partition(START)
    return before + START + "\n" + tables() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(tables())
