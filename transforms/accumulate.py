"""Gradient accumulation."""

from typing import Any

import torch

from functional_ds.base import tree
from functional_ds.base.batch import split
from functional_ds.base.tree import rows_of
from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.phase_signatures import Passed
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform


def accumulate(k: int) -> Transform:
    """Gradient accumulation: splits each batch into k micro-batches and sums their gradients before the update.

    ``accumulate(k)`` equals the step on the whole batch, and ``accumulate(j) ∘ accumulate(k) = accumulate(j k)``.

    Leaves of the batch are split along dim 0; a leaf with one row, or without rows, is passed to every micro-batch.
    Half-precision gradients are accumulated in fp32 and, in ZeRO stages 0 and 1, reduced in fp32. All data-parallel ranks must
    use the same k.

    Raises:
        ValueError: k is not a positive integer; the number of rows is not divisible by k; at ``init``, ranks differ in k.

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).mean(), fds.sgd(1.0))
    >>> state, _ = accumulate(2)(step)(step.init({"w": torch.zeros(())}), torch.tensor([1.0, 2.0, 3.0, 6.0]))
    >>> step.params(state)["w"].item()
    -3.0
    """
    if not isinstance(k, int) or k < 1:  # type: ignore[redundant-expr]
        raise ValueError(f"k={k!r}: the number of micro-batches must be a positive integer")

    def gradients(inner: Any, step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
        parts = split(batch, k)
        rows = rows_of(batch) // k
        metrics: dict[str, Weighted] = {}
        first = state.key
        for i, micro in enumerate(parts):
            key = None if first is None else first.at(step=first.step, rows=i * rows)
            state, carry, more = inner(step, tree.replace(state, key=key), micro, carry, last and i == k - 1)
            metrics = tree.map(torch.add, metrics, more) if metrics else more
        return tree.replace(state, key=first), carry, metrics  # type: ignore[return-value]

    return wrap(f"accumulate({k})", traits=[Trait.SPLITS_BATCHES], micro_batches=k, gradients=gradients)
