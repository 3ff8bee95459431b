"""The training loop ``fit``: saves, resumes, watches for hangs and logs.

With its options: checkpoints, evaluation, logging, sources of batches, and handling of non-finite losses; and ``watchdog``, for
custom loops.
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
