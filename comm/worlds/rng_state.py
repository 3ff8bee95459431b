"""What a process has one of, and each simulated rank its own: random generators and warning filters."""

import random
import warnings
from typing import Any

import attrs
import torch
from numpy.random import mtrand
from torch import Tensor

__all__ = ["Ambient", "drop_spare_normal"]


@attrs.frozen(eq=False)
class Ambient:
    """The state of torch's default CPU generator, of ``random``, of NumPy's global generator, and of ``warnings``.

    Grad mode, autocast and the like are each thread's own already.
    """

    torch_state: Tensor
    python_state: Any
    numpy_bits: Any
    warning_state: tuple[Any, ...]

    @classmethod
    def now(cls) -> "Ambient":
        """What it is at this moment."""
        filters = (warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl)  # type: ignore[attr-defined]
        return cls(torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator(), filters)

    def twins(self, count: int) -> "list[Ambient]":
        """The same state so often, each to go its own way: NumPy's generator is an object, the others are values."""
        kind, state = type(self.numpy_bits), self.numpy_bits.state
        found = [kind(0) for _ in range(count)]
        for bits in found:
            bits.state = state
        return [attrs.evolve(self, numpy_bits=bits) for bits in found]

    def restore(self) -> None:
        """Makes it so again."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        mtrand.set_bit_generator(self.numpy_bits)
        if warnings.filters is not self.warning_state[0] or warnings.showwarning is not self.warning_state[1]:
            warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl = self.warning_state  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]


def drop_spare_normal() -> None:
    """NumPy draws normal numbers in pairs and forgets the second one when its generator is exchanged.

    A rank that goes on at once must forget it, too, or its draws would depend on the interleaving.
    """
    mtrand.set_bit_generator(mtrand.get_bit_generator())
