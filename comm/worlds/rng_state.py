"""State that belongs to the process, and of which each simulated rank has its own: random generators and warning filters."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from numpy.random import mtrand
from torch import Tensor

__all__ = ["RngState", "drop_spare_normal", "kept_rng"]


@attrs.frozen(eq=False)
class RngState:
    """The states of torch's default CPU generator, of ``random``, of NumPy's global generator, and of ``warnings``.

    Grad mode and autocast need no care here: torch keeps them for each thread.
    """

    torch_state: Tensor
    python_state: Any
    numpy_bits: Any
    warning_state: tuple[Any, ...]

    @classmethod
    def now(cls) -> "RngState":
        """The current state."""
        filters = (warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl)  # type: ignore[attr-defined]
        return cls(torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator(), filters)

    def copies(self, count: int) -> "list[RngState]":
        """Independent copies. NumPy's generator is an object and gets copied; the other states are values."""
        kind, state = type(self.numpy_bits), self.numpy_bits.state
        found = [kind(0) for _ in range(count)]
        for bits in found:
            bits.state = state
        return [attrs.evolve(self, numpy_bits=bits) for bits in found]

    def restore(self) -> None:
        """Sets the process's generators and filters to this state."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        mtrand.set_bit_generator(self.numpy_bits)
        if warnings.filters is not self.warning_state[0] or warnings.showwarning is not self.warning_state[1]:
            warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl = self.warning_state  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]


@contextmanager
def kept_rng() -> Iterator[RngState]:
    """Restores the state when the block ends; yields it."""
    now = RngState.now()
    try:
        yield now
    finally:
        now.restore()


def drop_spare_normal() -> None:
    """Makes NumPy's generator forget the second number of a pair of normals.

    NumPy draws normals in pairs, and loses the second one when its generator is replaced. A rank that continues without a
    switch must lose it, too, or its draws would depend on the interleaving.
    """
    mtrand.set_bit_generator(mtrand.get_bit_generator())
