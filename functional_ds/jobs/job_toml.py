"""Plain data as TOML: what a job prints, and writes back."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["toml"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml(data: Mapping[str, Any]) -> str:
    """Strings, numbers, booleans, lists and tables as TOML.

    Law: ``tomllib.loads(toml(data)) == data``.

    >>> print(toml({"steps": 3, "optimizer": {"sgd": {"lr": 0.1}}}))
    steps = 3
    <BLANKLINE>
    [optimizer.sgd]
    lr = 0.1
    <BLANKLINE>
    """
    return "\n".join(_table(data, ())).lstrip("\n") + "\n"


def _table(data: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """The lines of a table: its values, then the tables in it."""
    tables = {name: value for name, value in data.items() if isinstance(value, Mapping)}
    plain = {name: value for name, value in data.items() if name not in tables}
    if path and (plain or not tables):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for name, value in plain.items():
        yield f"{_key(name)} = {_listed(value)}"
    for name, value in tables.items():
        yield from _table(value, (*path, name))


def _listed(value: Any) -> str:
    """A list of tables has one in each line."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return "[\n" + "".join(f"    {_inline(each)},\n" for each in value) + "]"
    return _inline(value)


def _inline(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else "nan" if math.isnan(value) else f"{'-' * (value < 0)}inf"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(name)} = {_inline(each)}' for name, each in value.items())}}}"
    raise TypeError(f"{value!r}: a job's file has strings, numbers, true and false, lists and tables")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    """As JSON quotes it, which is TOML but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
