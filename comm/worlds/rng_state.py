"""Global state that each simulated rank has a copy of: random generators, warning filters, the default dtype."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from numpy.random import mtrand
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor


@attrs.frozen(eq=False)
class RngState:
    """The states of torch's default CPU generator, ``random``, NumPy's generator, ``warnings``, and the default dtype.

    Grad mode and autocast are not included: in torch they are per thread.
    """

    torch_state: Tensor
    python_state: Any
    numpy_bits: Any
    filters: list[Any]
    show: tuple[Any, ...]
    dtype: torch.dtype

    @classmethod
    def now(cls) -> "RngState":
        """The current state."""
        show = (warnings.showwarning, warnings._showwarnmsg_impl)  # type: ignore[attr-defined]
        filters: list[Any] = warnings.filters  # type: ignore[assignment]  # a list, which is changed in place
        bits = mtrand.get_bit_generator()
        return cls(torch.get_rng_state(), random.getstate(), bits, filters, show, torch.get_default_dtype())

    def copies(self, count: int) -> "list[RngState]":
        """Independent copies. NumPy's generator and the filters are mutable and copied; the other states are values."""
        generator, state = type(self.numpy_bits), self.numpy_bits.state
        copies = [generator(_ZEROS) for _ in range(count)]
        for bits in copies:
            bits.state = state
        return [attrs.evolve(self, numpy_bits=bits, filters=[*self.filters]) for bits in copies]

    def restore(self) -> None:
        """Sets the process's generators, filters and default dtype to this state."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        mtrand.set_bit_generator(self.numpy_bits)
        if torch.get_default_dtype() is not self.dtype:
            torch.set_default_dtype(self.dtype)
        warnings.showwarning, warnings._showwarnmsg_impl = self.show  # type: ignore[attr-defined]
        others, warnings.filters = warnings.filters, self.filters
        if others != self.filters:  # otherwise modules may remember which warnings they have shown
            warnings._filters_mutated()  # type: ignore[attr-defined]


class _Zeros(ISeedSequence):
    """A cheap seed for a generator whose state is set afterwards; NumPy's own seeding takes most of the time of a copy."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.zeros(n_words, dtype)


_ZEROS = _Zeros()


@contextmanager
def kept_rng() -> Iterator[RngState]:
    """Yields the current state, runs the block on a copy of it, and restores it afterwards."""
    now = RngState.now()
    now.copies(1)[0].restore()
    try:
        yield now
    finally:
        now.restore()


def drop_spare_normal() -> None:
    """Drops the cached normal of NumPy's generator.

    NumPy draws normals in pairs, and loses the second one when its generator is replaced. A rank that continues without a
    switch must lose it too, or its draws would depend on the interleaving.
    """
    mtrand.set_bit_generator(mtrand.get_bit_generator())
