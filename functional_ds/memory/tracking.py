"""Memory that exists only within a step: gradients, and the peak of a process."""

from typing import Any

from functional_ds.base.device import peak_bytes, resident_peak_bytes
from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

from .counting import stored


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


def peak() -> int:
    """The peak bytes of this process: those of torch's allocator if a GPU is in use, else its resident memory.

    >>> peak() > 0
    True
    """
    allocated = peak_bytes()
    return resident_peak_bytes() if allocated is None else allocated
