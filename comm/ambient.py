"""What a process has one of, and each simulated rank its own: random generators and warning filters."""

import random
import sys
import warnings
from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = ["Ambient"]


@attrs.frozen(eq=False)
class Ambient:
    """The state of torch's default CPU generator, of ``random``, of NumPy's global generator, and of ``warnings``.

    Grad mode, autocast and the like are each thread's own already.
    """

    torch_state: Tensor
    python_state: Any
    numpy_state: Any
    filters: tuple[Any, ...]

    @classmethod
    def now(cls) -> "Ambient":
        """What it is at this moment."""
        numpy = sys.modules.get("numpy.random")
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            numpy.get_state(legacy=False) if numpy else None,
            (warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl),  # type: ignore[attr-defined]
        )

    def restore(self) -> None:
        """Makes it so again."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        if self.numpy_state is not None:
            sys.modules["numpy.random"].set_state(self.numpy_state)
        if warnings.filters is not self.filters[0] or warnings.showwarning is not self.filters[1]:
            warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl = self.filters  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]
