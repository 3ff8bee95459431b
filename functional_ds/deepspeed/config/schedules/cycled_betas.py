"""OneCycle's momentum: betas that cycle inversely to the learning rate, as a function of the updates."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.optim.optimizer import Optimizer, PerParameter, Rate

Betas = tuple[float, float]
Built = Optimizer | PerParameter


@attrs.frozen
class BetaCycle:
    """DeepSpeed's betas of each update. The first update has the lowest first beta; the second beta is 0.99.

    Attributes:
        height: of the cycle, 0 to 1, by the updates so far, as the rate's.
        total: updates of the cycle.
        low: the first beta where the rate is highest.
        high: where it is lowest.
        decay: the rate of the first beta's decay after the cycle.
        every: updates per unit of ``decay``; 0 for no decay.
    """

    height: Callable[[Tensor], Tensor] = attrs.field(repr=False)
    total: float
    low: float
    high: float
    decay: float
    every: int

    def __call__(self, updates: int) -> Betas:
        """The betas of the update after this many."""
        if updates < 1:
            return self.low, 0.99
        if updates - 1 < self.total:
            height = self.height(torch.tensor(float(updates), dtype=torch.float64)).item()
            return self.high - (self.high - self.low) * height, 0.99
        moved = self.decay * ((updates - self.total) / self.every) if self.decay and self.every else 0.0
        return self.high * (1 + moved), 0.99


@tree.record
class CycledState:
    """The number of updates, and the optimizer's own state."""

    updates: Tensor
    inner: Any


def cycled(build: Callable[[Betas], Built], betas: Callable[[int], Betas]) -> Built:
    """The optimizer ``build(betas(k))`` in update k, with a state that counts updates.

    Betas are host numbers, so on a GPU each update waits for the count.

    Args:
        build: from betas to an optimizer; its state has one structure for all betas.
        betas: from the number of updates so far.
    """
    first = build(betas(0))
    return of_pairs(first, lambda pair_of: _cycled(lambda held: pair_of(build(held)), betas), f"cycled({first.name})")


def of_pairs(first: Built, wrap: Callable[[Callable[[Any], Optimizer]], Optimizer], name: str) -> Built:
    """A rule of pairs of functions that change between updates.

    Args:
        first: a rule like those to come.
        wrap: from a function that gives a rule's pair to the pair that takes its place. A rule of ``PerParameter`` has one for
            each map of leaves.
        name: of the rule, if it is of ``PerParameter``.
    """
    if isinstance(first, Optimizer):
        return wrap(lambda rule: rule)
    return PerParameter(lambda leaf_map: wrap(lambda rule: rule.make(leaf_map)), name)


def _cycled(of: Callable[[Betas], Optimizer], betas: Callable[[int], Betas]) -> Optimizer:
    of = lru_cache(maxsize=8)(of)
    first = of(betas(0))

    def init(params: list[Tensor]) -> CycledState:
        device = params[0].device if params else torch.device("cpu")
        return CycledState(torch.zeros((), dtype=torch.float32, device=device), first.init(params))

    def update(params: list[Tensor], grads: Weighted, state: CycledState, rate: Rate) -> tuple[list[Tensor], CycledState]:
        now = of(betas(int(state.updates.item())))
        params, inner = now.update(params, grads, state.inner, rate)
        updates = state.updates.add_(1 if grads.skip is None else 1 - grads.skip.float())
        return params, CycledState(updates, inner)

    return attrs.evolve(first, init=init, update=update, name=f"cycled({first.name})")
