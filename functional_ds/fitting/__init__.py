"""The loop that lives on: ``fit`` saves, resumes, watches and reports.

``fds.fit``; what it takes: sources of batches, loggers, what to do when losses are not finite; and ``watchdog``, for loops of
one's own.
"""

from .health import NonFiniteLossError, RollBack, Stop
from .logs import CsvLog, Logger, TensorBoard
from .loop import fit
from .run import Interrupted
from .signals import Flag, noted_for_ranks, noted_here
from .source import Epochs, Indexed, Reader, Replayed, Source, Stateful
from .watchdog import EXIT_CODE, Watch, watchdog

__all__ = [
    "EXIT_CODE",
    "CsvLog",
    "Epochs",
    "Flag",
    "Indexed",
    "Interrupted",
    "Logger",
    "NonFiniteLossError",
    "Reader",
    "Replayed",
    "RollBack",
    "Source",
    "Stateful",
    "Stop",
    "TensorBoard",
    "Watch",
    "fit",
    "noted_for_ranks",
    "noted_here",
    "watchdog",
]
