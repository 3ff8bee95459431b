"""Errors of checkpoints, this library's or others'."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Earlier checkpoints are unaffected."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, truncated, altered, or belongs to something else."""


class NewerFormatError(CheckpointError):
    """A later version of this library wrote the checkpoint."""


class StructureError(CheckpointError, ValueError):
    """A checkpoint and a state differ in their leaves or in leaves' shapes."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class BusyError(CheckpointError):
    """Another job saves into the same folder."""
