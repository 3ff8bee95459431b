"""Work that succeeds on all ranks, or raises an error on all of them."""

from collections.abc import Callable
from typing import TypeVar

from functional_ds import comm

from .errors import CheckpointError

T = TypeVar("T")
S = TypeVar("S")


def all_or_none(group: comm.Group, work: Callable[[], T]) -> T:
    """The result of ``work()``; an error of any rank is raised on all. Collective.

    All ranks raise the same class: that of the lowest rank with an error, whose message the others repeat. A rank with its own
    error of that class raises its own.
    """
    return gather_or_none(group, work, share=lambda _: None)[0]


def gather_or_none(group: comm.Group, work: Callable[[], T], *, share: Callable[[T], S]) -> tuple[T, list[S]]:
    """As ``all_or_none``, and also gathers ``share(result)`` of every rank. Collective.

    Args:
        group: the ranks.
        work: what this rank does; its result stays here.
        share: from the result to what the other ranks get.
    """
    results: list[tuple[T, S]] = []
    error: Exception | None = None
    try:
        result = work()
        results.append((result, share(result)))
    except Exception as caught:
        error = caught
    everyone = comm.all_gather_object(([shared for _, shared in results], _portable(error)), group)
    for rank, (_, failure) in enumerate(everyone):
        if failure is not None:
            if error is not None and _portable(error)[0] is failure[0]:  # type: ignore[index]
                raise error
            raise failure[0](f"rank {rank}: {failure[1]}")
    return results[0][0], [shared for (shared,), _ in everyone]


def _portable(error: Exception | None) -> tuple[type[CheckpointError], str] | None:
    """An error's class and message for other ranks; errors of other kinds become CheckpointError."""
    if error is None:
        return None
    if isinstance(error, CheckpointError):
        return type(error), str(error)
    return CheckpointError, f"{type(error).__name__}: {error}"
