"""Handles of asynchronous operations that write into the caller's tensors."""

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec

from torch import Tensor

from functional_ds import comm

from .comms_log import logged
from .joining import group_of

__all__ = ["Work"]

P = ParamSpec("P")


class Work:
    """The handle that ``async_op=True`` returns.

    ``wait`` writes the caller's tensors, so an operation whose handle is dropped takes part in the exchange but leaves them
    unchanged.
    """

    def __init__(self, pending: "comm.Pending[Any]", targets: Sequence[Tensor]) -> None:
        self._pending, self._targets, self._written = pending, targets, False

    def wait(self, timeout: Any = None) -> bool:
        """Waits, and writes the result. The world's own timeout applies, for any ``timeout``."""
        if not self._written:
            _write(self._targets, self._pending.wait())
            self._written = True
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return immediately."""
        return self._written or self._pending.poll()

    def __repr__(self) -> str:
        return f"Work({'done' if self._written else self._pending})"


def _write(targets: Sequence[Tensor], result: Any) -> None:
    """Copies a result into tensors: a list into as many, one tensor into their elements, one after the other."""
    if not targets:
        return
    parts = result.reshape(-1).split([tensor.numel() for tensor in targets]) if isinstance(result, Tensor) else result
    for target, part in zip(targets, parts, strict=True):
        target.detach().copy_(part.view(target.shape))


# A collective with its arguments, and the caller's tensors that its result is written into.
InPlace = tuple[partial[Any], Sequence[Tensor]]


def in_place(function: Callable[P, InPlace]) -> Callable[P, Work | None]:
    """The function as a call that runs the collective and writes its result, or returns the handle that writes it.

    The function gets this library's group; ``async_op`` is handled here.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Work | None:
        given = signature.bind(*args, **kwargs)
        given.arguments["group"] = group_of(given.arguments.get("group"))
        collective, targets = function(*given.args, **given.kwargs)
        if given.arguments.get("async_op"):
            return Work(comm.start(collective.func, *collective.args, **collective.keywords), targets)
        _write(targets, collective())
        return None

    return logged(call)
