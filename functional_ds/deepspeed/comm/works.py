"""The handle of an operation that is under way and writes into the caller's tensors."""

from collections.abc import Callable
from typing import Any

from functional_ds import comm

__all__ = ["Work", "carried_out"]


class Work:
    """What ``async_op=True`` returns. The caller's tensors are written by ``wait``, so an operation whose handle is dropped
    takes part in the exchange but leaves them as they are.
    """

    def __init__(self, pending: "comm.Pending[Any]", write: Callable[[Any], None]) -> None:
        self._pending, self._write, self._written = pending, write, False

    def wait(self, timeout: Any = None) -> bool:
        """Waits, and writes the result. The world's own time limit holds, whatever ``timeout`` says."""
        if not self._written:
            self._write(self._pending.wait())
            self._written = True
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._written or self._pending.poll()

    def __repr__(self) -> str:
        return f"Work({'done' if self._written else self._pending})"


def carried_out(request: "comm.table.Request[Any]", write: Callable[[Any], None], async_op: bool) -> Work | None:
    """Carries out a collective and writes its result; with ``async_op`` it is started, and the returned handle writes."""
    if async_op:
        return Work(request.start(), write)
    write(request.run())
    return None
