"""Memory that exists only within a step: gradients, gathered units, and the peak of a process."""

from collections.abc import Callable
from typing import Any

import attrs

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.device import peak_bytes, resident_peak_bytes
from functional_ds.base.weighted import Weighted
from functional_ds.dry_run.events import EventRecorder
from functional_ds.step.compose import wrap
from functional_ds.step.state import State
from functional_ds.step.step import Step, Transform

from .counting import stored

__all__ = ["Tracked", "noted", "peak"]


def noted(sizes: list[int]) -> Transform:
    """A transform that appends the bytes of each step's gradients, as the optimizer gets them, and changes nothing.

    >>> import functional_ds as fds
    >>> sizes = []
    >>> step = noted(sizes)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.1)))
    >>> _ = step(step.init({"w": torch.ones(100)}), torch.ones(100))
    >>> sizes
    [400]
    """

    def reduce(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        after, reduced = inner(step, state, grads)
        sizes.append(stored(reduced.sum))
        return after, reduced

    return wrap("noted", reduce=reduce)


class Tracked:
    """An all-gather that measures how many gathered bytes are allocated: ``zero(3, all_gather=Tracked())``."""

    def __init__(self, gather: Callable[..., Any] = comm.all_gather) -> None:
        self._run = EventRecorder()
        self._gather = gather

    @property
    def peak(self) -> int:
        """The most bytes at one time, gathers in flight included."""
        return self._run.events.peak()

    def __call__(self, x: Any, group: comm.Group | None = None, **options: Any) -> Any:
        return self.request(x, group, **options).run()

    def request(self, x: Any, group: comm.Group | None = None, **options: Any) -> comm.table.Request[Any]:
        """The gather, whose result is noted."""
        size = sum(leaf.nbytes for leaf in tree.leaves(x)) * (group or comm.world()).size
        self._run.resized()
        expected = self._run.expect(size, "all_gather")

        def arrived(whole: Any) -> Any:
            self._run.events.append(attrs.evolve(expected, bytes=-size))
            self._run.note(whole, "all_gather")
            return whole

        return comm.table.prepare(self._gather, x, group, **options).then(arrived)

    def __repr__(self) -> str:
        return f"tracked({getattr(self._gather, '__name__', self._gather)})"


def peak() -> int:
    """The peak bytes of this process: those of torch's allocator if a GPU is in use, else its resident memory."""
    found = peak_bytes()
    return resident_peak_bytes() if found is None else found
