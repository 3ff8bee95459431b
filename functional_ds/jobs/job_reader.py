"""Plain data into frozen records by their annotations, and back."""

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from .call_entry import CallEntry, call_entry, plain
from .job_errors import JobError, joined, nearest

__all__ = ["changed", "entries", "entry", "read", "shown", "typed", "written"]


def entry(
    help: str,
    *,
    default: Any = attrs.NOTHING,
    kind: str | None = None,
    check: Callable[[Any], str | None] | None = None,
    always: bool = False,
) -> Any:
    """A field of a record that a job's file can have.

    Args:
        help: what it means, in a sentence.
        default: its value where it is left out; none if it must be given.
        kind: of a call, which functions it may name.
        check: says what a value must be instead; None if it is right.
        always: whether it is written even at its default.
    """

    def checked(record: Any, field: Any, value: Any) -> None:
        wanted = None if check is None or value is None else check(value)
        if wanted:
            raise JobError(f"it must be {wanted}", entry=field.name, value=value)

    factory = {"factory": dict} if default == {} else {"default": default}
    metadata = {"help": help, "kind": kind, "always": always}
    return attrs.field(**factory, metadata=metadata, validator=checked, kw_only=True)


def typed(record: type[Any], fields: "list[attrs.Attribute[Any]]") -> "list[attrs.Attribute[Any]]":
    """For ``attrs.frozen(field_transformer=)``: each entry takes what its annotation says, or plain data for it."""
    return [field.evolve(converter=_converter(field)) if "help" in field.metadata else field for field in fields]


def _converter(field: "attrs.Attribute[Any]") -> Callable[[Any], Any]:
    kind, wanted = field.metadata["kind"], field.type

    def convert(value: Any) -> Any:
        try:
            return _typed(value, wanted) if kind is None else _calls(value, kind)
        except JobError as error:
            raise error.within(field.name) from None

    return convert


def entries(record: type[Any]) -> "list[attrs.Attribute[Any]]":
    """The fields of a record that a file can have."""
    return [field for field in attrs.fields(record) if "help" in field.metadata]


def _calls(value: Any, kind: str) -> Any:
    """One call, several of them, or None."""
    if not isinstance(value, list | tuple):
        return None if value is None else call_entry(value, kind)
    found = []
    for index, each in enumerate(value):
        try:
            found.append(call_entry(each, kind))
        except JobError as error:
            raise (error if error.entry else error.within(str(index))) from None
    return tuple(found)


def read(record: type[Any], data: Any) -> Any:
    """A record from a table.

    Raises:
        JobError: an entry is unknown, missing or of another type.
    """
    if isinstance(data, record):
        return data
    if not isinstance(data, Mapping):
        raise JobError("it must be a table of entries", value=data)
    fields = {field.name: field for field in entries(record)}
    for name, value in data.items():
        if name not in fields:
            raise JobError(f"there is no such entry; {nearest(str(name), list(fields))}", entry=str(name), value=value)
    lacking = [name for name, field in fields.items() if field.default is attrs.NOTHING and name not in data]
    if lacking:
        raise JobError(f"it needs {', '.join(lacking)}: {fields[lacking[0]].metadata['help']}")
    return record(**data)


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _typed(value: Any, wanted: Any) -> Any:
    """The value as its annotation has it."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        if value is None and type(None) in parts:
            return None
        rest = [each for each in parts if each is not type(None)]
        errors = []
        for each in rest:
            try:
                return _typed(value, each)
            except JobError as error:
                errors.append(error)
        if len(errors) == 1 or errors[0].entry:
            raise errors[0]
        words = " or ".join(error.problem.removeprefix("it must be ") for error in errors)
        raise JobError(f"it must be {words}", value=value)
    if origin is Literal:
        if value not in parts or isinstance(value, bool):
            raise JobError(f"it must be one of {', '.join(map(repr, parts))}", value=value)
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise JobError(f"it must be a list, each {_WORDS.get(parts[0], 'a table')}", value=value)
        return tuple(_part(each, parts[0], str(index)) for index, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise JobError("it must be a table", value=value)
        return {str(name): _part(each, parts[1], str(name)) for name, each in value.items()}
    if attrs.has(wanted):
        return read(wanted, value)
    if wanted is Any:
        return plain(value)
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is str and hasattr(value, "__fspath__"):
        return str(value)
    if type(value) is not wanted:
        raise JobError(f"it must be {_WORDS[wanted]}", value=value)
    return value


def _part(value: Any, wanted: Any, name: str) -> Any:
    try:
        return _typed(value, wanted)
    except JobError as error:
        raise error.within(name) from None


def written(record: Any, *, defaults: bool) -> dict[str, Any]:
    """A record as plain data, without what is None, and without defaults unless they are asked for."""
    found: dict[str, Any] = {}
    for field in entries(type(record)):
        value = getattr(record, field.name)
        default: Any = {} if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
        if field.converter is not None and default is not attrs.NOTHING:
            default = _converter(field)(default)
        if value is None or (value == default and not defaults and not field.metadata["always"]):
            continue
        found[field.name] = written(value, defaults=defaults) if _is_record(value) else plain(value)
    return found


def shown(record: Any) -> str:
    """A record as the call that makes it, without defaults: a ``__repr__``."""
    own = written(record, defaults=False)
    return f"{type(record).__name__}({', '.join(f'{name}={getattr(record, name)!r}' for name in own)})"


def _is_record(value: Any) -> bool:
    return attrs.has(type(value)) and not isinstance(value, CallEntry)


def changed(data: dict[str, Any], path: str, value: Any) -> None:
    """Sets the entry at a path, such as "data.context" or "strategy.zero.stage"; None removes it.

    Raises:
        JobError: the path leads into an entry that is no table, or to a call that the job does not have.
    """
    _set(data, path, value, "")


def _set(table: dict[str, Any], path: str, value: Any, above: str) -> None:
    # a key may have dots of its own, as "package.module:function" has
    name = max((key for key in table if path == key or path.startswith(f"{key}.")), key=len, default=path.partition(".")[0])
    rest = path[len(name) + 1 :]
    here = joined(above, name)
    if not rest:
        if value is None:
            table.pop(name, None)
        else:
            table[name] = plain(value)
    elif isinstance(table.get(name, {}), dict):
        _set(table.setdefault(name, {}), rest, value, here)
    elif isinstance(table[name], list):
        _set_call(table[name], rest, value, here)
    else:
        raise JobError("it is no table, so nothing in it can be changed", entry=here, value=table[name])


def _set_call(listed: list[Any], path: str, value: Any, above: str) -> None:
    names = [next(iter(each)) for each in listed if isinstance(each, dict) and len(each) == 1]
    found = max((name for name in names if path == name or path.startswith(f"{name}.")), key=len, default=None)
    if found is None:
        name = path.partition(".")[0]
        raise JobError(f"the job has none of this name to change; {nearest(name, names)}", entry=joined(above, name))
    index = next(index for index, each in enumerate(listed) if found in each)
    if path == found and value is None:
        del listed[index]
    else:
        _set(listed[index], path, value, above)
