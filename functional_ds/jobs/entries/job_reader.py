"""``Entries``: frozen records that pydantic reads from plain data; they can be written back, and changed by paths."""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, ValidationError, model_validator

from .call_entry import call_entry, plain
from .job_errors import JobError, first_key, joined, nearest

MOST_RANKS = 2**20
_MOST = annotated_types.Le(2**31 - 1)
AtLeastOne = Annotated[StrictInt, annotated_types.Ge(1), _MOST]
NotNegative = Annotated[StrictInt, annotated_types.Ge(0), _MOST]
Ranks = Annotated[StrictInt, annotated_types.Ge(1), annotated_types.Le(MOST_RANKS)]


def entry(help: str, **more: Any) -> Any:
    """A field of a job's record, as ``pydantic.Field`` makes it, with its help in a sentence."""
    return Field(description=help, **more)


def call_of(kind: str) -> BeforeValidator:
    """Reads one function of a kind, with its arguments."""
    return BeforeValidator(lambda value: call_entry(value, kind))


def calls_of(kind: str) -> BeforeValidator:
    """Reads several."""

    def read(value: Any) -> Any:
        calls = []
        for index, item in enumerate(value if isinstance(value, list | tuple) else [value]):
            try:
                calls.append(call_entry(item, kind))
            except JobError as error:
                raise (error if error.entry else error.within(str(index))) from None
        return tuple(calls)

    return BeforeValidator(read)


class Entries(BaseModel):
    """A table of a job's file: each field is an entry, explained by its description.

    Raises:
        JobError: an entry is unknown, missing or of another type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _refused(type(self), error) from None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        return {str(name): plain(value) for name, value in data.items()} if isinstance(data, Mapping) else data

    @classmethod
    def read(cls, data: Any, **more: Any) -> Self:
        """The record of a table that contains only entries, made with further arguments.

        Raises:
            JobError: an entry is invalid.
        """
        if not isinstance(data, Mapping):
            raise JobError("it must be a table of entries", value=data)
        for name in data:
            if name not in cls.model_fields:
                raise _unknown(cls, str(name), data[name])
        return cls(**data, **more)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and dict(self._written(defaults=True)) == dict(other._written(defaults=True))

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name, _ in self._written(defaults=False))
        return f"{type(self).__name__}({arguments})"

    def to_dict(self, *, defaults: bool = False) -> dict[str, Any]:
        """As plain data for JSON; entries at their defaults are omitted unless asked for."""
        entries = self._written(defaults=defaults)
        return {
            name: value.to_dict(defaults=defaults) if isinstance(value, Entries) else plain(value) for name, value in entries
        }

    def _written(self, *, defaults: bool) -> Iterator[tuple[str, Any]]:
        """The entries to write: those that are not None."""
        for name, field in type(self).model_fields.items():
            value, always = getattr(self, name), field.json_schema_extra == ALWAYS
            if value is not None and (defaults or always or value != field.get_default(call_default_factory=True)):
                yield name, value


ALWAYS: Any = {"always": True}  # an entry that is written even at its default
_WORDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list, each a string",
    "dict_type": "a table",
    "model_type": "a table of entries",
    "model_attributes_type": "a table of entries",
    "literal_error": "one of {expected}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
}


def _unknown(record: type[BaseModel], name: str, value: Any) -> JobError:
    return JobError(f"there is no such entry; {nearest(name, list(record.model_fields))}", entry=name, value=value)


def _refused(record: type[BaseModel], errors: ValidationError) -> JobError:
    """The first of the errors: of unknown entries, of those that are missing, then of the others."""
    reported = errors.errors(include_url=False)
    for detail in reported:
        if detail["type"] == "extra_forbidden":
            return _unknown(record, str(detail["loc"][0]), detail["input"])
    missing = [str(detail["loc"][0]) for detail in reported if detail["type"] == "missing"]
    if missing:
        return JobError(f"it needs {', '.join(missing)}: {record.model_fields[missing[0]].description}")
    first = reported[0]
    place = _place(record, first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, JobError):
        return cause.within(place)
    same = [detail for detail in reported if _place(record, detail["loc"]) == place]
    kinds = ((_WORDS.get(detail["type"]), detail) for detail in same)
    words = dict.fromkeys(detail["msg"] if word is None else word.format(**detail.get("ctx", {})) for word, detail in kinds)
    wanted = " or ".join(words).replace("' or '", "', '")
    return JobError(f"it must be {wanted}", entry=place, value=first["input"])


def _place(record: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """The entry of an error. Within an entry of several types, pydantic also names the type."""
    if not loc:
        return ""
    wanted = record.model_fields[str(loc[0])].annotation
    several = get_origin(wanted) in (Union, UnionType) and len(set(get_args(wanted)) - {type(None)}) > 1
    return joined(*map(str, loc[:1] if several else loc))


def changed(table: dict[str, Any], path: str, value: Any, *, above: str = "") -> None:
    """Sets the entry at a path, such as "data.context" or "strategy.zero.stage"; None removes it. The table is at ``above``.

    Raises:
        JobError: the path leads into an entry that is not a table, or to a call that the job does not have.
    """
    name = first_key(table, path) or path.partition(".")[0]
    rest = path[len(name) + 1 :]
    here = joined(above, name)
    if not rest:
        if value is None:
            table.pop(name, None)
        else:
            table[name] = plain(value)
    elif isinstance(table.get(name, {}), dict):
        changed(table.setdefault(name, {}), rest, value, above=here)
    elif isinstance(table[name], list):
        _set_call(table[name], rest, value, here)
    else:
        raise JobError("it is not a table, so nothing in it can be changed", entry=here, value=table[name])


def _set_call(listed: list[Any], path: str, value: Any, above: str) -> None:
    names = [next(iter(call)) for call in listed if isinstance(call, dict) and len(call) == 1]
    key = first_key(names, path)
    if key is None:
        name = path.partition(".")[0]
        raise JobError(f"the job has none of this name to change; {nearest(name, names)}", entry=joined(above, name))
    index = next(index for index, call in enumerate(listed) if key in call)
    if path == key and value is None:
        del listed[index]
    else:
        changed(listed[index], path, value, above=above)
