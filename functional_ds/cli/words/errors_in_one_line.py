"""Errors of the command line: one line that names what is wrong."""

__all__ = ["CommandError", "one_line"]


class CommandError(Exception):
    """The user's input cannot be used; the message is one line, and the exit code 2."""


def one_line(text: str) -> str:
    """A message of several lines as one.

    >>> one_line("the config has 2 keys:\\n  a: unknown\\n  b: unknown")
    'the config has 2 keys: a: unknown; b: unknown'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    joined = ""
    for line in lines:
        joined += line if not joined else (" " if joined.endswith((":", ";", ",")) else "; ") + line
    return joined
