"""Checks regular expressions and names that users give, and suggests the nearest known name."""

import difflib
import re
from collections.abc import Iterable


def check_expression(what: str, expression: str) -> None:
    """Checks a regular expression; ``what`` begins the error message.

    Raises:
        ValueError: it is invalid.
    """
    try:
        re.compile(expression)
    except (re.error, TypeError) as error:
        raise ValueError(f"{what}{expression!r} is not a regular expression: {error}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Names the known name that is nearest to ``name``, for error messages.

    >>> nearest("h.0.q", ["h.0.q_proj", "wte"]), nearest("h", [])
    ("the nearest is 'h.0.q_proj'", 'there is none')
    """
    matches = difflib.get_close_matches(name, [*known], 1, 0.0)
    return f"the nearest is {matches[0]!r}" if matches else "there is none"
