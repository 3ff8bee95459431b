"""Errors of the command line: one line that names what is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """The user's input cannot be used; the message is one line, and the exit code 2."""


@contextmanager
def refused(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """A context in which errors of these kinds are reported as errors of the user's input.

    Args:
        what: the input, at the beginning of the message.
        kinds: of errors.

    Raises:
        CommandError: there is one.
    """
    try:
        yield
    except kinds as error:
        raise CommandError(f"{what}: {error}") from error


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
