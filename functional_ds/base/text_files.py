"""Text files of bounded size, and JSON of bounded depth."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .files import read_regular

__all__ = ["MAX_DEPTH", "MAX_TEXT", "check_plain", "parse_json", "read_text"]

MAX_TEXT = 64 << 20  # bytes of a config, a job or an index
MAX_DEPTH = 64  # of blocks within blocks


def read_text(path: Path, *, limit: int = MAX_TEXT) -> str:
    """The content of a text file in UTF-8. It never waits for a writer, and reads at most ``limit`` bytes.

    Raises:
        OSError: it cannot be read; is a pipe, a socket, a device or a folder; has more bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_regular(path, limit=limit).decode("utf-8")


def parse_json(text: str, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text whose blocks are nested at most 64 deep, and whose strings can be written as UTF-8.

    Args:
        text: the JSON.
        pairs: ``object_pairs_hook`` of ``json.loads``.

    Raises:
        json.JSONDecodeError: it is no such text.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
        ...
    json.decoder.JSONDecodeError: its blocks are nested deeper than 64: line 1 column 1 (char 0)
    """
    try:
        found = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise json.JSONDecodeError(_TOO_DEEP, text, 0) from None
    except ValueError as error:
        if type(error) is not ValueError:  # as of a number with thousands of digits
            raise
        raise json.JSONDecodeError(str(error), text, 0) from None
    try:
        check_plain(found)
    except ValueError as error:
        raise json.JSONDecodeError(str(error), text, 0) from None
    return found


_TOO_DEEP = f"its blocks are nested deeper than {MAX_DEPTH}"


def check_plain(data: Any) -> None:
    """Checks that plain data can be walked by recursion, printed and written.

    Raises:
        ValueError: blocks are nested deeper than 64; a string has half of a surrogate pair, which UTF-8 does not have.

    >>> check_plain({"name": chr(0xD800)})
    Traceback (most recent call last):
        ...
    ValueError: the string '\\ud800' has half of a surrogate pair, which is no character
    """
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += value.keys()
                inner += value.values()
            elif isinstance(value, list | tuple):
                inner += value
            elif isinstance(value, str) and not value.isascii():
                _check_string(value)
        if not inner:
            return
        level = inner
    raise ValueError(_TOO_DEEP)


def _check_string(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the string {value!r} has half of a surrogate pair, which is no character") from None
