"""What a function finds when it runs again: the tape with its axes, and its modules, as in the first run."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
from torch import Tensor, nn

from functional_ds.step.axes import axes, with_axes
from functional_ds.step.tape import Tape, current_tape

from .buffer_snapshot import Rewind

__all__ = ["ModuleCalls", "TapeNow"]


@attrs.frozen(eq=False)
class TapeNow:
    """The open tape, what ran modules in it, and its axes, for when the backward pass runs the function again.

    In a pipeline one tape has many micro-batches, whose axes differ in their documents.
    """

    tape: Tape | None
    calls: tuple[Any, ...]
    axes: Mapping[str, Any]

    @staticmethod
    def now() -> "TapeNow":
        """As it is in this thread."""
        tape = current_tape()
        return TapeNow(tape, () if tape is None else tape.calls, axes())

    def claims(self, tensor: Tensor) -> bool:
        """Whether the tensor is a param, whose memory comes and goes."""
        return self.tape is not None and any(claim(tensor) for claim in self.tape.claims)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the tape is open again as it was."""
        tape = self.tape
        if tape is None:
            yield
            return
        now, tape.calls = tape.calls, self.calls
        try:
            # a device's backward has its own thread
            with nullcontext() if current_tape() is tape else tape.resumed(), with_axes(self.axes):
                yield
        finally:
            tape.calls = now


@attrs.define(eq=False)
class ModuleCalls:
    """The calls of modules inside a region: further runs find in a module what the first run found in it.

    Attributes:
        reruns: whether there are further runs.
    """

    reruns: bool
    _snapshots: list[Rewind] = attrs.field(factory=list)  # one for each call, in order
    _left: Iterator[Rewind] | None = None  # those that this run has not come to yet; None in the first run
    _inside: frozenset[nn.Module] = frozenset()  # the modules that are being called, and their submodules

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """A further run, maybe in the middle of the first: a backward pass inside the function runs it again that far."""
        before, self._left = (self._left, self._inside), iter(self._snapshots)
        self._inside = frozenset()
        try:
            yield
        finally:
            self._left, self._inside = before

    @contextmanager
    def calling(self, module: nn.Module) -> Iterator[None]:
        """A call of a module."""
        if not self.reruns or module in self._inside:
            yield
            return
        before, self._inside = self._inside, self._inside.union(module.modules())
        try:
            with self._snapshot(module):
                yield
        finally:
            self._inside = before

    def _snapshot(self, module: nn.Module) -> AbstractContextManager[None]:
        if self._left is None:
            self._snapshots.append(Rewind())
            return self._snapshots[-1].once(module)
        found = next(self._left, None)
        return nullcontext() if found is None else found.again(module)
