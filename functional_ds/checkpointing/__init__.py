"""Checkpoints: whole states in a folder, for any number of ranks, whatever happens while they are written.

``fds.save`` and ``fds.load``; ``Saver`` for saves in the background.
"""

from .errors import BusyError, CheckpointError, DamagedError, NewerFormatError, NoCheckpointError, StructureError
from .folder import latest, tags
from .loading import load
from .saver import Saver
from .saving import save
from .verifying import verify

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
