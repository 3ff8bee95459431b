"""What can go wrong between ranks, each with a name."""

__all__ = [
    "CommError",
    "DeadlockError",
    "DivergenceError",
    "MismatchError",
    "RankFailedError",
    "TimedOutError",
    "UnmatchedError",
]


class CommError(RuntimeError):
    """A collective could not be carried out."""


class MismatchError(CommError):
    """Ranks of one group called different collectives, or the same one with shapes or dtypes that do not fit."""


class DeadlockError(CommError):
    """No rank can go on: every unfinished rank waits for another."""


class DivergenceError(CommError):
    """Two interleavings of one program give different results."""


class RankFailedError(CommError):
    """A rank's process raised an error that could not be carried over, or ended without one."""


class TimedOutError(CommError):
    """Some ranks did not come to what others waited in."""


class UnmatchedError(CommError):
    """All ranks have finished, and some never came to a collective or a message that others started."""
