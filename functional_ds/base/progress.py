"""Progress bars: on a console, in a file, in a notebook."""

import sys
from collections.abc import Iterable
from typing import Any


def progress_bar(steps: Iterable[Any] | None = None, *, total: int | None = None, done: int = 0) -> Any:
    """A bar of tqdm's that counts steps: a widget in a notebook with ipywidgets, else a line of text on stderr.

    It moves every 0.1 s, and in files every 10 s.

    Args:
        steps: what the bar iterates over; None for ``bar.update()``.
        total: the number of steps; None for that of ``steps``, or if it is open.
        done: the number of earlier steps.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    moves = sys.stderr.isatty() or "ipykernel.zmqshell" in sys.modules
    return tqdm(steps, total=total, initial=done, unit="step", dynamic_ncols=True, mininterval=0.1 if moves else 10.0)
