"""The saved-tensor hooks that are in force, so that hooks inside of them can hand on what is not theirs."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from .keeping import Here

__all__ = ["Hooks"]


@attrs.frozen(eq=False)
class Hooks:
    """What autograd keeps instead of a tensor, and the tensor from it.

    ``torch.autograd.graph.saved_tensors_hooks`` nest, but torch applies the innermost alone.
    """

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    @staticmethod
    def in_force() -> "Hooks":
        """Those of this thread; where there are none, the tensor stays as it is, and a change in place is refused."""
        # Torch has no public name for this; dynamo and AOTAutograd ask in the same way.
        found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return Hooks(*found) if found else Hooks(Here, lambda kept: kept.get())
