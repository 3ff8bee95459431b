"""Distributed checkpoints of whole states, loadable on any number of ranks, and crash-safe while they are written.

``fds.save`` and ``fds.load``; ``Saver`` saves asynchronously.
"""

from functional_ds.state_dict.errors import (
    BusyError,
    CheckpointError,
    DamagedError,
    NewerFormatError,
    NoCheckpointError,
    StructureError,
)

from .directory import latest, tags
from .load import load, verify
from .save import Saver, save

__all__ = [
    "BusyError",
    "CheckpointError",
    "DamagedError",
    "NewerFormatError",
    "NoCheckpointError",
    "Saver",
    "StructureError",
    "latest",
    "load",
    "save",
    "tags",
    "verify",
]
