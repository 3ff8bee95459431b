"""Schedules as CSV files, a row for each rank and a cell for each action, as in ``torch.distributed.pipelining``."""

import csv
import re
from collections.abc import Sequence
from io import StringIO
from os import PathLike
from pathlib import Path

from functional_ds.base.disk.files import read_text

from .action import Action, Kind
from .schedule import Schedule

_THEIRS = {Kind.GATHER: "UNSHARD", Kind.EVICT: "RESHARD", Kind.REDUCE: "REDUCE_GRAD"}
_OURS = {name: kind.name for kind, name in _THEIRS.items()}
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_PARAMETERS = re.compile(rf"(\d+)({'|'.join(_OURS)})")


def to_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Writes the schedule, lowered or not, in torch's format: ``0F0``, ``1SEND_B3``, ``0UNSHARD``.

    Law: afterwards ``from_csv(path) == schedule``.

    >>> import tempfile
    >>> from functional_ds.pipelining import gpipe
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     to_csv(gpipe(2, 2), f"{folder}/gpipe.csv")
    ...     Path(folder, "gpipe.csv").read_text().split()
    ['0F0,0F1,0B0,0B1', '1F0,1F1,1B0,1B1']
    """
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([_cell(action) for action in row] for row in schedule)


def _cell(action: Action) -> str:
    return f"{action.stage}{_THEIRS[action.kind]}" if action.kind in _THEIRS else str(action)


def from_csv(path: str | PathLike[str], *, placement: Sequence[int] | None = None, microbatches: int | None = None) -> Schedule:
    """Reads a schedule that ``to_csv`` or torch has written.

    Empty cells, torch's idle slots, are skipped. A pair ``(0F3;3B1)OVERLAP_F_B`` is read as its two actions. Only the form of
    the cells is checked; ``validate`` checks the schedule. ``pipeline`` runs a lowered schedule as written;
    ``from_csv(path).compute_only()`` leaves the messages to ``lower``.

    Args:
        path: the file.
        placement: the rank that holds each stage; by default the rank whose row computes the stage first.
        microbatches: the number of micro-batches; by default as many as the rows name.

    Raises:
        ValueError: a cell is not an action (names its row and column, counted from 1), the file has no rows, or is not text.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("0F0,0F1,,0B0,0B1\\n1F0,1B0,,1F1,1B1\\n")
    ...     file.flush()
    ...     print(from_csv(file.name))
    2 stages on 2 ranks, 2 micro-batches
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    """
    try:
        text = read_text(Path(path)).removeprefix("\ufeff")
        table = list(csv.reader(StringIO(text, newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}; write a CSV file with a row for each rank") from None
    rows = [
        [action for column, cell in enumerate(cells, 1) for action in _actions(cell, path, row, column)]
        for row, cells in enumerate(table, 1)
    ]
    if not rows:
        raise ValueError(f"{path} has no rows; a schedule has one for each rank")
    return Schedule.of(rows, placement, microbatches)


def _actions(cell: str, path: str | PathLike[str], row: int, column: int) -> list[Action]:
    pair = _PAIR.fullmatch(cell.strip())
    try:
        return [_action(part.strip()) for part in (pair[1].split(";") if pair else [cell]) if part.strip()]
    except ValueError as error:
        raise ValueError(f"{path}, row {row}, column {column}: {error}") from None


def _action(text: str) -> Action:
    match = _PARAMETERS.fullmatch(text)
    return Action.of(match[1] + _OURS[match[2]] if match else text)
