"""What a function finds in its modules when it runs again: what it found in them in the first run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import attrs
from torch import nn

from .buffer_snapshot import Rewind

__all__ = ["ModuleCalls"]


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
