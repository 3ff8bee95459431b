"""The loop that lives on: ``fit`` saves, resumes, watches and reports.

``fds.fit``; what it takes: sources of batches, loggers, what to do when losses are not finite; and ``watchdog``, for loops of
one's own.
"""

from .data import Epochs, Indexed, Reader, Replayed, Source, Stateful
from .fit import fit
from .loggers import CsvLog, Logger, TensorBoard
from .non_finite import NonFiniteLossError, RollBack, Stop
from .run import Interrupted
from .signals import Flag, noted_for_ranks, noted_here
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
