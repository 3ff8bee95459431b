"""The end of a world: finishes outstanding calls, or abandons them with a message, before connections close.

When the interpreter exits it ends its threads, and torch aborts the process if one of them is in its C++ code. Messages that
have not been waited for are lost with the process.
"""

import sys
from collections.abc import Callable, Iterable
from time import monotonic

from functional_ds.comm.table.errors import CommError, TimedOutError

from .worker import Worker

GRACE = 2.0  # seconds to finish outstanding calls
_HASTE = 0.2  # seconds if an exception is the reason for the end, since other ranks wait to hear of it
_SHOWN = 5  # calls that the message names


def ending_error() -> BaseException | None:
    """The exception that is being handled, or that ended the program; None without one."""
    return sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def follows_another_rank(error: BaseException | None) -> bool:
    """Whether the error is a consequence of another rank's failure."""
    while error is not None:
        transport = isinstance(error.__cause__, RuntimeError) and not isinstance(error.__cause__, CommError)
        if isinstance(error, TimedOutError) or (isinstance(error, CommError) and transport):
            return True
        error = error.__cause__ or error.__context__
    return False


def finish(workers: Iterable[Worker], rank: int, break_off: Callable[[], None]) -> None:
    """Ends the threads of a world. Calls that do not finish in time are abandoned and listed on stderr.

    Args:
        workers: the world's threads.
        rank: this rank, for the message.
        break_off: makes all waits for messages in the world fail at once.
    """
    workers, grace = [*workers], _HASTE if ending_error() else GRACE
    for worker in workers:
        worker.close()
    deadline = monotonic() + grace
    late = [worker for worker in workers if not worker.join(deadline - monotonic())]
    if not late:
        return
    calls = [call for worker in late for call in worker.under_way]
    more = f", and {len(calls) - _SHOWN} more" if len(calls) > _SHOWN else ""
    if sys.stderr is not None:
        named = ", ".join(calls[:_SHOWN])
        sys.stderr.write(f"rank {rank} ends and gives up, after {grace} s, what is under way: {named}{more}\n")
    break_off()
    deadline = monotonic() + GRACE
    for worker in late:
        worker.join(deadline - monotonic())
