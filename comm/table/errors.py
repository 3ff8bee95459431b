"""Errors of collective communication."""

from collections.abc import Mapping

__all__ = [
    "CommError",
    "DeadlockError",
    "DivergenceError",
    "MismatchError",
    "RankFailedError",
    "TimedOutError",
    "UnmatchedError",
    "VarianceError",
    "WrittenError",
    "of_rank",
]


class CommError(RuntimeError):
    """A collective failed. The base class of this module's errors."""


class MismatchError(CommError):
    """Ranks of a group called different collectives, or one with different shapes, dtypes or options."""


class DeadlockError(CommError):
    """No rank can continue: every unfinished rank waits for another.

    Attributes:
        waits: by rank, the call that it is blocked in and the ranks that it waits for; empty if unknown.
    """

    def __init__(self, *args: object, waits: Mapping[int, tuple[str, tuple[int, ...]]] | None = None) -> None:
        super().__init__(*args)
        self.waits = dict(waits or {})


class DivergenceError(CommError):
    """Two interleavings of a program gave different results."""


class RankFailedError(CommError):
    """A rank's process ended without a result, or raised an error that cannot be pickled."""


def of_rank(error: BaseException, rank: int, world_size: int) -> BaseException:
    """A rank's error as its world raises it; a SystemExit with code 0 becomes a RankFailedError, so that it is not lost."""
    if isinstance(error, SystemExit) and not error.code:
        return RankFailedError(f"rank {rank} of {world_size} called exit({error.code!r}) before it returned; return instead")
    return error


class TimedOutError(CommError):
    """Some ranks did not make a call in which others waited, within the timeout."""


class UnmatchedError(CommError):
    """All ranks finished, and some never made a call that others had started."""


class VarianceError(CommError):
    """A value contradicts its declaration along a group of ranks, or its use does."""


class WrittenError(CommError):
    """A tensor was written to between the start of an asynchronous collective and its wait."""
