"""Updates that may move nothing, decided on the device."""

from typing import Any

import torch
from torch import Tensor

from . import tree
from .weighted import Weighted

__all__ = ["found_inf", "guarded"]


def found_inf(grads: Weighted) -> Tensor | None:
    """``grads.skip`` as torch's fused kernels want it: 1.0 makes them leave everything as it is."""
    return None if grads.skip is None else grads.skip.float()


def guarded(pair: Any, params: list[Tensor], grads: Weighted, state: Any, rate: float | Tensor) -> tuple[list[Tensor], Any]:
    """``pair.update``, or what was there before, bit for bit, where ``grads.skip`` says so.

    Nothing waits for the device. An optimizer with ``skips`` sees to it itself; for any other one the params and the state
    are copied before the update and chosen after it.
    """
    if grads.skip is None or getattr(pair, "skips", False):
        return pair.update(params, grads, state, rate)  # type: ignore[no-any-return]
    before = tree.map(_copy, (params, state))
    after = tuple(pair.update(params, grads, state, rate))
    chosen: tuple[list[Tensor], Any] = tree.map(lambda old, new: _choose(grads.skip, old, new), before, after)
    return chosen


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _choose(skip: Tensor, old: Any, new: Any) -> Any:
    return torch.where(skip, old, new) if isinstance(new, Tensor) else new
