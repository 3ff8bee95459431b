"""Binds an optimizer to the tensors of a step, after checking that it is correct for them."""

from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_selection import IndivisibleStateError, LeafSelection, StateParts

from .elementwise_trial import ELEMENTWISE, Trial, counting, tried, unfit_form
from .kernels import guarded
from .optimizer import Optimizer, PerParameter, Rate


@attrs.define(eq=False)
class BoundOptimizer:
    """An optimizer bound to the tensors of a step. The trial runs once; a ``PerParameter`` makes an optimizer per leaf map."""

    rule: Optimizer | PerParameter
    _trial: Trial | None = None
    _last: tuple[LeafMap, Optimizer] | None = None
    _counts: frozenset[str] | None = None

    def at(self, leaf_map: Callable[[], LeafMap]) -> Optimizer:
        """The optimizer for tensors with this leaf map; ``leaf_map`` is not called for an elementwise optimizer.

        Raises:
            ValueError: the trial has shown that the optimizer is not correct for these tensors.
        """
        if isinstance(self.rule, Optimizer):
            _refuse_tensors(self.rule)
            self._trial = self._trial or tried(self.rule)
            if self._trial == ELEMENTWISE:
                return self.rule
        current = leaf_map()
        if self._last is None or self._last[0] != current:
            self._last = (current, _made(self.rule, current, self._trial))
        return self._last[1]

    def update(
        self, params: list[Tensor], grads: Weighted, state: Any, *, rate: Rate, leaf_map: Callable[[], LeafMap]
    ) -> tuple[list[Tensor], Any]:
        """Performs an update, except where ``grads.skip`` and ``grads.unused`` exclude it.

        Leaves that have skipped the same number of updates are updated together, as views of the tensors. The optimizer's step
        counts are reduced by that number, so each leaf is updated as if it were the only one.

        Args:
            params: the trained tensors, which are updated in place.
            grads: their gradients.
            state: the optimizer's state.
            rate: multiplies the learning rate.
            leaf_map: returns the leaf map of the tensors.

        Raises:
            IndivisibleStateError: leaves are unused, and the state cannot be split by leaves; nothing has changed.
        """
        pair, unused = self.at(leaf_map), grads.unused
        if unused is None or pair.skips_unused:
            return guarded(pair, params, grads, state, rate)
        try:
            parts = StateParts.of(state, params)
            counts = self._counting(parts)
        except IndivisibleStateError as error:
            raise IndivisibleStateError(
                f"optimizer: {self} cannot skip leaves, because {error}; in this step, or one before, no rank's loss used "
                f"{', '.join(map(repr, sorted({*unused.paths, *unused.idle})[:3]))}. Give such leaves gradients of zero with "
                "fds.train_step(..., unused='zeros'), or give them another optimizer with fds.param_groups"
            ) from None
        if not unused.paths and not counts:
            return guarded(pair, params, grads, state, rate)
        current, moved = leaf_map(), [*params]
        dense = tree.replace(grads, sum=[grad.contiguous() if current.flat else grad for grad in grads.sum], unused=None)
        together: dict[int, list[int]] = {}  # by the number of skipped updates
        for place, leaf in enumerate(current.leaves):
            if leaf.path not in unused.paths:
                together.setdefault(unused.idle.get(leaf.path, 0) if counts else 0, []).append(place)
        for idle, places in sorted(together.items()):
            some = LeafSelection.of(current, places)
            rule = _made(self.rule, attrs.evolve(some.leaf_map, partial=current.partial or len(together) > 1), self._trial)
            views, before = some.views(moved), parts.select(some, counts, idle)
            of_group = tree.replace(dense, sum=some.views(dense.sum))
            new, after = guarded(rule, [*views], of_group, before, rate)
            some.put(moved, views, new)
            parts.put(some, before, after, counts)
        return moved, parts.joined(counts, 1 if grads.skip is None else grads.skip.logical_not())

    def _counting(self, parts: StateParts) -> frozenset[str]:
        """The roles of the state's numbers that count updates, determined by an update of an example.

        Raises:
            IndivisibleStateError: a number of the state is neither constant nor a count of updates.
        """
        if not parts.numbers():  # there may be some in the state of other leaves
            return frozenset()
        if self._counts is None:
            self._counts = counting(self.rule)
        return self._counts

    def __str__(self) -> str:
        return str(self.rule)


def _refuse_tensors(rule: Optimizer) -> None:
    if rule.tensors:
        raise ValueError(
            f"optimizer: {', '.join(rule.tensors)} of {rule} given as tensors, which this step's kernels cannot differentiate: "
            "use fds.differentiable(step), or pass numbers"
        )


def _made(rule: Optimizer | PerParameter, leaf_map: LeafMap, trial: Trial | None) -> Optimizer:
    if isinstance(rule, PerParameter):
        return rule.make(leaf_map)
    wrong = unfit_form(leaf_map, trial or ELEMENTWISE)
    if wrong:
        raise ValueError(
            f"optimizer: {rule} is not elementwise: in a trial it updated params differently when it got {wrong}, which is "
            "what it gets here. Clip with T.clip; write a rule for whole matrices with fds.per_matrix, and any other that "
            "needs whole leaves as fds.PerParameter; an fds.Optimizer that takes care of this itself sets elementwise=True"
        )
    return rule
