"""Plain data as TOML: what a job prints, and writes back."""

from collections.abc import Mapping
from typing import Any

import tomlkit

__all__ = ["toml"]


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
        found = tomlkit.array()
        for each in value:
            found.append(_item(each, tomlkit.inline_table))
        return found.multiline(bool(value) and all(isinstance(each, Mapping) for each in value))
    if not isinstance(value, bool | int | float | str):
        raise TypeError(f"{value!r}: a job's file has strings, numbers, true and false, lists and tables")
    return tomlkit.item(value)
