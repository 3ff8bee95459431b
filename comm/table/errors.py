"""Errors between ranks."""

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
    """A collective could not be carried out."""


class MismatchError(CommError):
    """Ranks of one group called different collectives, or one with shapes or dtypes that do not match."""


class DeadlockError(CommError):
    """No rank can continue: every unfinished rank waits for another."""


class DivergenceError(CommError):
    """Two interleavings of a program give different results."""


class RankFailedError(CommError):
    """A rank's process ended without a result, or raised an error that cannot be pickled."""


def of_rank(error: BaseException, rank: int, world_size: int) -> BaseException:
    """A rank's error as its world raises it: no SystemExit of code 0, by which the program would end as if all were well."""
    if isinstance(error, SystemExit) and not error.code:
        return RankFailedError(f"rank {rank} of {world_size} called exit({error.code!r}) before it returned; return instead")
    return error


class TimedOutError(CommError):
    """Some ranks did not make a call that others waited in."""


class UnmatchedError(CommError):
    """All ranks have finished, and some never made a call that others had started."""


class VarianceError(CommError):
    """A value is not what it was declared to be along a group of ranks, or is used as if it were something else."""


class WrittenError(CommError):
    """A tensor was written between an asynchronous collective's start and its wait."""
