"""What can go wrong between ranks, each with a name."""

__all__ = ["CommError", "DeadlockError", "MismatchError", "RankFailedError"]


class CommError(RuntimeError):
    """A collective could not be carried out."""


class MismatchError(CommError):
    """Ranks of one group called different collectives, or the same one with shapes or dtypes that do not fit."""


class DeadlockError(CommError):
    """No rank can go on: every unfinished rank waits for another."""


class RankFailedError(CommError):
    """A rank's process raised an error that could not be carried over, or ended without one."""
