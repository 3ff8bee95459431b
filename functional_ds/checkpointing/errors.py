"""What can be wrong with a checkpoint, each with a name."""

__all__ = ["BusyError", "CheckpointError", "DamagedError", "NewerFormatError", "NoCheckpointError", "StructureError"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; checkpoints from before are as they were."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, shortened, altered or not one of its files."""


class NewerFormatError(CheckpointError):
    """A checkpoint was written by a later version of this library."""


class StructureError(CheckpointError, ValueError):
    """A checkpoint holds other leaves, or leaves of other shapes, than were asked for."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class BusyError(CheckpointError):
    """Another job saves into the same folder."""
