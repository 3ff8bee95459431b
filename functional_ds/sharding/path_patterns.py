"""What is wrong with the patterns and names that users give: no regular expression, or none that is known."""

import difflib
import re
from collections.abc import Iterable

__all__ = ["check_expression", "nearest"]


def check_expression(what: str, expression: str) -> None:
    """Refuses what is no regular expression; ``what`` says which argument it is in.

    Raises:
        ValueError: it is none.
    """
    try:
        re.compile(expression)
    except (re.error, TypeError) as error:
        raise ValueError(f"{what}{expression!r} is no regular expression: {error}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Which of the known names is meant, perhaps.

    >>> nearest("h.0.q", ["h.0.q_proj", "wte"]), nearest("h", [])
    ("the nearest is 'h.0.q_proj'", 'there is none')
    """
    found = difflib.get_close_matches(name, [*known], 1, 0.0)
    return f"the nearest is {found[0]!r}" if found else "there is none"
