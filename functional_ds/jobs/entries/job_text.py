"""The text of a job's file: plain data as TOML, and the lines of entries."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import tomlkit
    from tomlkit.container import Container
    from tomlkit.exceptions import TOMLKitError
    from tomlkit.items import AbstractTable, AoT, Array
except ModuleNotFoundError as error:
    raise ImportError("jobs need pydantic and tomlkit: pip install 'functional-ds[jobs]'") from error

from functional_ds.base.disk.files import parse_json, read_text

from .job_errors import JobError, first_key

_MOST = 1 << 20  # characters of a text in which a line is looked for
_MARK = "\0"  # which TOML does not have


@contextmanager
def located(file: str | None) -> Iterator[None]:
    """A context in which errors of a job name its file, and the line of the entry if it is there."""
    try:
        yield
    except JobError as error:
        if file is None or error.file is not None:
            raise
        raise error.at(file, _line(Path(file), error.entry)) from error.__cause__


def _line(file: Path, entry: str) -> int | None:
    finders = {".toml": line_of, ".json": json_line_of}
    if not entry or file.suffix not in finders or not file.is_file():
        return None
    text = read_text(file)
    return finders[file.suffix](text, entry) if len(text) < _MOST else None


def line_of(text: str, entry: str) -> int | None:
    """The line of an entry in a TOML file, or of its table; None if neither is there.

    >>> line_of("steps = 3\\n[data]\\nrows = 4\\n", "data.rows")
    3
    """
    try:
        document = tomlkit.parse(text)
    except (TOMLKitError, RecursionError):
        return None
    line, places = None, list[Any]([document])
    for name in _keys(tomllib.loads(text), entry):
        places = [item for place in places for key, item in _body(place) if key == name]
        for item in (place.body[0] if isinstance(place, AoT) else place for place in places[:1]):
            before, item.trivia.indent = item.trivia.indent, f"{item.trivia.indent}{_MARK}"
            head, mark, _ = document.as_string().partition(_MARK)
            item.trivia.indent = before
            line = head.count("\n") + 1 if mark else line  # a table without a header of its own has no mark
    return line


def _body(place: Any) -> Iterator[tuple[str, Any]]:
    """The keys and items of a table, or of all tables in a list."""
    if isinstance(place, Array | AoT):
        for item in place:
            yield from _body(item)
    elif isinstance(place, Container | AbstractTable):
        container = place if isinstance(place, Container) else place.value
        yield from ((key.key, item) for key, item in container.body if key is not None)


def json_line_of(text: str, entry: str) -> int | None:
    """The same of a JSON file.

    >>> json_line_of('{"steps": 3,\\n"data": {"rows": 4}}', "data.rows")
    2
    """
    place = None
    for name in _keys(parse_json(text), entry):
        match = re.compile(rf"{re.escape(json.dumps(name))}\s*:").search(text, place or 0)
        place = match.start() if match else place
    return None if place is None else text.count("\n", 0, place) + 1


def _keys(data: Any, entry: str) -> Iterator[str]:
    """The existing keys on an entry's path. A call in a list is identified by its name."""
    while entry:
        if isinstance(data, list):
            index, _, rest = entry.partition(".")
            if index.isdigit() and int(index) < len(data):
                data, entry = data[int(index)], rest
                continue
            data = next((table for table in data if isinstance(table, Mapping) and first_key(table, entry)), None)
        name = first_key(data, entry) if isinstance(data, Mapping) else None
        if name is None:
            return
        yield name
        data, entry = data[name], entry[len(name) + 1 :]


def toml(data: Mapping[str, Any]) -> str:
    """Strings, numbers, booleans, lists and tables as TOML.

    Law: ``tomllib.loads(toml(data)) == data``.

    >>> print(toml({"steps": 3, "optimizer": {"sgd": {"lr": 0.1}}}))
    steps = 3
    <BLANKLINE>
    [optimizer.sgd]
    lr = 0.1
    <BLANKLINE>

    Raises:
        TypeError: something else is in it.
    """
    return tomlkit.dumps(_table(data, tomlkit.document()))


def _table(data: Mapping[str, Any], table: Any) -> Any:
    """A table with its values, then the tables in it; an inline one within a list."""
    for name, value in sorted(data.items(), key=lambda item: isinstance(item[1], Mapping)):
        table.append(
            name, _item(value, tomlkit.inline_table if isinstance(table, tomlkit.items.InlineTable) else tomlkit.table)
        )
    return table


def _item(value: Any, table: Any) -> Any:
    if isinstance(value, Mapping):
        return _table(value, table())
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        for item in value:
            array.append(_item(item, tomlkit.inline_table))
        return array.multiline(bool(value) and all(isinstance(item, Mapping) for item in value))
    if not isinstance(value, bool | int | float | str):
        raise TypeError(f"{value!r}: a job's file has strings, numbers, true and false, lists and tables")
    return tomlkit.item(value)
