"""Captures a pass, to restore it when the backward pass recomputes a function."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
from torch import Tensor

from .pass_scope import Pass, current_pass


@attrs.frozen(eq=False)
class Moment:
    """A captured pass, to restore when the backward pass recomputes a function.

    In a pipeline one pass has many micro-batches, whose axes differ in their documents.
    """

    pass_: Pass | None
    calls: tuple[Any, ...] = ()
    axes: Mapping[str, Any] = attrs.field(factory=dict)

    @staticmethod
    def now() -> "Moment":
        """Captures this thread's pass."""
        pass_ = current_pass()
        return Moment(None) if pass_ is None else Moment(pass_, pass_.calls, pass_.axes)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is in the memory of a param that is gathered and freed."""
        return self.pass_ is not None and self.pass_.owns(tensor) is not None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the pass is current again, as it was."""
        pass_ = self.pass_
        if pass_ is None:
            yield
            return
        now = pass_.calls, pass_.axes
        pass_.calls, pass_.axes = self.calls, self.axes
        try:
            with nullcontext() if current_pass() is pass_ else pass_.resumed():  # a device's backward has its own thread
                yield
        finally:
            pass_.calls, pass_.axes = now
