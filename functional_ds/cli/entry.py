"""The program ``functional-ds``."""

import importlib.util
import os
import sys
from collections.abc import Sequence

from .words.errors_in_one_line import CommandError, one_line
from .words.pages import printable

_USER = (CommandError, ValueError, TypeError, OSError, ImportError, RuntimeError, LookupError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0 for success, 1 for a negative answer, 2 for unusable input.

    An error is one line. ``FUNCTIONAL_DS_TRACEBACK=1`` shows its traceback.
    """
    for name in ("typer", "rich"):
        if importlib.util.find_spec(name) is None:
            return _refuse(f"the command line needs {name}: pip install 'functional-ds[cli]'")
    from .app import run  # it imports typer

    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except _USER as error:
        if os.environ.get("FUNCTIONAL_DS_TRACEBACK") == "1":
            raise
        name = "" if isinstance(error, CommandError) else f"{type(error).__name__}: "
        return _refuse(f"{name}{error}")
    except SystemExit as error:
        if error.code:
            raise
        return _refuse("a program that was named has called exit(); leave the call out")
    except KeyboardInterrupt:
        return 130


def _refuse(words: str) -> int:
    sys.stderr.write(f"functional-ds: error: {printable(one_line(words))}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
