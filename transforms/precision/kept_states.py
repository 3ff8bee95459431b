"""Optimizer states in a narrow dtype, and the rounding of updated values into storage."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import foreach_copy_

from .stochastic_rounding import Draws, round_stochastically


@attrs.frozen
class KeptStates:
    """The dtype of the optimizer's fp32 state between updates.

    Attributes:
        dtype: None keeps it as it is. Scalars, such as step counts, are never cast.
    """

    dtype: torch.dtype | None

    def narrow(self, leaf: Any) -> Any:
        """A leaf of a new state, in the stored dtype."""
        narrows = self.dtype is not None and isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.dim()
        return leaf.to(self.dtype) if narrows else leaf

    def wide(self, kept: Any) -> Any:
        """The state in the dtypes of an update."""
        if self.dtype is None:
            return kept
        return tree.map(lambda leaf: leaf.float() if self._is_narrow(leaf) else leaf, kept)

    def kept(self, kept: Any, wide: Any, draws: Draws | None) -> Any:
        """The state after an update, in the memory of the one before.

        Args:
            kept: the state before.
            wide: what the update returned.
            draws: for stochastic rounding; None rounds to nearest.
        """
        if self.dtype is None:
            return wide
        named, leaves = tree.named(kept), tree.leaves(wide)
        uniforms = [
            draws.for_state(path, new) if draws and rounds(old, new) else None
            for (path, old), new in zip(named, leaves, strict=True)
        ]
        return tree.unflatten(tree.structure(kept), rounded([old for _, old in named], leaves, uniforms))

    def _is_narrow(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.dtype == self.dtype


def rounds(old: Any, new: Any) -> bool:
    """Whether a value is rounded stochastically into the old one's dtype."""
    return isinstance(old, Tensor) and (old.dtype, new.dtype) == (torch.bfloat16, torch.float32)


def rounded(stored: Sequence[Any], moved: Sequence[Any], uniforms: Sequence[Tensor | None]) -> list[Any]:
    """Rounds wide values into stored memory, which the update owns; those rounded to nearest in one call."""
    rounded, into, values = [], list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for old, new, uniform in zip(stored, moved, uniforms, strict=True):
            if not isinstance(old, Tensor) or new.dtype == old.dtype:
                rounded.append(new)
                continue
            rounded.append(old)
            if uniform is None:
                into.append(old)
                values.append(new)
            else:
                old.copy_(round_stochastically(new, uniform))
        if into:
            foreach_copy_(into, values)
    return rounded
