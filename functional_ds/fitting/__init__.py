"""The training loop ``fit``, which saves, resumes, watches and reports.

With the records that it takes: checkpoints, evaluation, logging, sources of batches, what to do about losses that are not
finite; and ``watchdog``, for custom loops.
"""

from .checkpoints import Checkpoints
from .data import BatchReader, BatchSource, Epochs, Indexed, Replayed, Stateful
from .fit import fit
from .heartbeat import Watch
from .loggers import Comet, Console, CsvLog, Logger, Logging, MeasuredStep, StepMeasure, TensorBoard, WandB
from .non_finite import NonFiniteLossError, RollBack, Stop
from .run import Evaluation, Interrupted
from .signals import Flag, stop_on_signals, stop_ranks_on_signals
from .watchdog import EXIT_CODE, watchdog

__all__ = [
    "EXIT_CODE",
    "BatchReader",
    "BatchSource",
    "Checkpoints",
    "Comet",
    "Console",
    "CsvLog",
    "Epochs",
    "Evaluation",
    "Flag",
    "Indexed",
    "Interrupted",
    "Logger",
    "Logging",
    "MeasuredStep",
    "NonFiniteLossError",
    "Replayed",
    "RollBack",
    "Stateful",
    "StepMeasure",
    "Stop",
    "TensorBoard",
    "WandB",
    "Watch",
    "fit",
    "stop_on_signals",
    "stop_ranks_on_signals",
    "watchdog",
]
