"""The training loop ``fit``, which saves, resumes, watches and reports.

With the records that it takes: checkpoints, evaluation, logging, sources of batches, what to do about losses that are not
finite; and ``watchdog``, for loops of your own.
"""

from .checkpoints import Checkpoints
from .data import BatchReader, BatchSource, Indexed, Replayed, Stateful
from .epochs import Epochs
from .fit import fit
from .loggers import CsvLog, Logger, Logging, TensorBoard
from .non_finite import NonFiniteLossError, RollBack, Stop
from .run import Evaluation, Interrupted
from .signals import Flag, stop_on_signals, stop_ranks_on_signals
from .watchdog import EXIT_CODE, Watch, watchdog

__all__ = [
    "EXIT_CODE",
    "BatchReader",
    "BatchSource",
    "Checkpoints",
    "CsvLog",
    "Epochs",
    "Evaluation",
    "Flag",
    "Indexed",
    "Interrupted",
    "Logger",
    "Logging",
    "NonFiniteLossError",
    "Replayed",
    "RollBack",
    "Stateful",
    "Stop",
    "TensorBoard",
    "Watch",
    "fit",
    "stop_on_signals",
    "stop_ranks_on_signals",
    "watchdog",
]
