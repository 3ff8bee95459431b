"""Binds an optimizer to the tensors that it gets, and refuses one that a trial shows to be wrong for such tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_selection import IndivisibleStateError, LeafSelection, StateParts

from .kernels import guarded
from .optimizer import Optimizer, PerParameter, Rate

__all__ = ["BoundOptimizer", "Trial", "tried"]

_SCALES = (
    1e4,
    0.1,
    1.0,
)  # of the gradients of the trial's three updates; a large one triggers clipping by norm, small ones show it
_CUT = 7  # where the trial's 17 elements are cut, within the first leaf
_RTOL, _ATOL = 1e-3, 1e-5  # _ATOL is relative to the largest move of an element; the trial computes in fp64


@attrs.frozen
class Trial:
    """The result of a trial: in which forms an optimizer moves the example's leaves as it moves them in their own shapes.

    Attributes:
        joined: as one flat tensor of both leaves.
        alone: each leaf in a call by itself.
        cut: as two shards of the flat tensor, each in a call by itself.
    """

    joined: bool = True
    alone: bool = True
    cut: bool = True


_ELEMENTWISE = Trial()


@attrs.define(eq=False)
class BoundOptimizer:
    """An optimizer bound to the tensors of a step. The trial runs once; a ``PerParameter`` makes its pair once per leaf map."""

    rule: Optimizer | PerParameter
    _trial: Trial | None = None
    _last: tuple[LeafMap, Optimizer] | None = None
    _counts: frozenset[str] | None = None

    def at(self, leaf_map: Callable[[], LeafMap]) -> Optimizer:
        """The optimizer for tensors with this leaf map; ``leaf_map`` is not called for an elementwise optimizer.

        Raises:
            ValueError: as the trial shows, the optimizer is not correct for these tensors.
        """
        if isinstance(self.rule, Optimizer):
            self._trial = self._trial or tried(self.rule)
            if self._trial == _ELEMENTWISE:
                return self.rule
        found = leaf_map()
        if self._last is None or self._last[0] != found:
            self._last = (found, _made(self.rule, found, self._trial))
        return self._last[1]

    def update(
        self, params: list[Tensor], grads: Weighted, state: Any, *, rate: Rate, leaf_map: Callable[[], LeafMap]
    ) -> tuple[list[Tensor], Any]:
        """The optimizer's update; it leaves alone what ``grads.skip`` and ``grads.unused`` say.

        Leaves that were used in equally many updates are updated together, as views of the tensors. The optimizer gets its
        counts of updates less those that left these leaves alone, so each leaf moves as it would by itself.

        Args:
            params: the trained tensors, which are written into.
            grads: their gradients.
            state: the optimizer's.
            rate: what multiplies the learning rate.
            leaf_map: gives the leaf map of the tensors.

        Raises:
            IndivisibleStateError: leaves are unused, and the state cannot be taken apart by leaves; nothing has changed.
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
        found, moved = leaf_map(), [*params]
        dense = tree.replace(grads, sum=[grad.contiguous() if found.flat else grad for grad in grads.sum], unused=None)
        together: dict[int, list[int]] = {}  # by how many updates left them alone
        for place, leaf in enumerate(found.leaves):
            if leaf.path not in unused.paths:
                together.setdefault(unused.idle.get(leaf.path, 0) if counts else 0, []).append(place)
        for idle, places in sorted(together.items()):
            some = LeafSelection.of(found, places)
            rule = _made(self.rule, attrs.evolve(some.leaf_map, partial=found.partial or len(together) > 1), self._trial)
            views, before = some.views(moved), parts.select(some, counts, idle)
            own = tree.replace(dense, sum=some.views(dense.sum))
            new, after = guarded(rule, [*views], own, before, rate)
            some.put(moved, views, new)
            parts.put(some, before, after, counts)
        return moved, parts.joined(counts, 1 if grads.skip is None else grads.skip.logical_not())

    def _counting(self, parts: StateParts) -> frozenset[str]:
        """The roles of the state's numbers that count updates, as an update of an example shows.

        Raises:
            IndivisibleStateError: a number of the state neither stays nor counts.
        """
        if not parts.numbers():  # there may be some in the state of other leaves
            return frozenset()
        if self._counts is None:
            self._counts = _counting(self.rule)
        return self._counts

    def __str__(self) -> str:
        return str(self.rule)


def _made(rule: Optimizer | PerParameter, leaf_map: LeafMap, trial: Trial | None) -> Optimizer:
    if isinstance(rule, PerParameter):
        return rule.make(leaf_map)
    wrong = _wrong(leaf_map, trial or _ELEMENTWISE)
    if wrong:
        raise ValueError(
            f"optimizer: {rule} is not elementwise: in a trial it moved params otherwise when it got {wrong}, which is what it "
            "gets here. Clip with T.clip; write a rule for whole matrices with fds.per_matrix, and any other that needs whole "
            "leaves as fds.PerParameter; an fds.Optimizer that takes care of this itself says elementwise=True"
        )
    return rule


def _wrong(leaf_map: LeafMap, trial: Trial) -> str | None:
    """The form of these tensors for which the trial showed the optimizer to be wrong; None if there is none."""
    if not trial.cut and any(leaf.region.ranges for leaf in leaf_map.leaves):
        return "slices of leaves"
    if not trial.cut and leaf_map.group is not None and leaf_map.group.size > 1:
        return "shards of flat tensors"
    if not trial.joined and leaf_map.flat:
        return "flat tensors of several leaves"
    if not trial.alone and leaf_map.partial:
        return "one leaf at a time"
    return None


def tried(rule: Optimizer) -> Trial:
    """Runs three updates of a matrix and a vector in each form of ``Trial``, on the CPU in fp64, and compares the moves.

    A difference proves that the optimizer is not elementwise. Agreement proves nothing: the trial does not see what depends on
    other shapes, on other gradients or on later updates. An optimizer that fails on the example, draws random numbers,
    communicates, or gives different results for equal arguments counts as elementwise.
    """
    if rule.elementwise:
        return _ELEMENTWISE
    generator = torch.Generator().manual_seed(0)
    params, *grads = (torch.randn(17, generator=generator, dtype=torch.float64) for _ in range(1 + len(_SCALES)))
    grads = [grad * scale for grad, scale in zip(grads, _SCALES, strict=True)]
    try:
        with torch.random.fork_rng(devices=[]), comm.ledger() as book:
            whole, again = (_moved(rule, params, grads, _as_leaves) for _ in range(2))
            joined = _moved(rule, params, grads, _as_flat)
            matrix = _moved(rule, params[:12], [grad[:12] for grad in grads], lambda flat: [flat.view(3, 4)])
            vector = _moved(rule, params[12:], [grad[12:] for grad in grads], _as_flat)
            ends = (slice(None, _CUT), slice(_CUT, None))
            shards = [_moved(rule, params[end], [grad[end] for grad in grads], _as_flat) for end in ends]
            if book.rows or not torch.equal(whole, again):
                return _ELEMENTWISE
            return Trial(*(_agree(whole, found) for found in (joined, torch.cat([matrix, vector], 1), torch.cat(shards, 1))))
    except Exception:  # the example does not suit this optimizer
        return _ELEMENTWISE


def _as_flat(flat: Tensor) -> list[Tensor]:
    return [flat]


def _as_leaves(flat: Tensor) -> list[Tensor]:
    return [flat[:12].view(3, 4), flat[12:]]


def _moved(rule: Optimizer, start: Tensor, grads: Sequence[Tensor], as_tensors: Callable[[Tensor], list[Tensor]]) -> Tensor:
    """How far each element is from its start after each update: [updates, elements]."""
    params, found = [p.clone() for p in as_tensors(start)], []
    state = rule.init([p.clone() for p in params])
    for grad in grads:
        weighted = Weighted([g.clone() for g in as_tensors(grad)], torch.ones((), dtype=torch.float64))
        params, state = rule.update(params, weighted, state, 1.0)
        found.append(torch.cat([p.detach().reshape(-1) for p in params]) - start)
    return torch.stack(found)


def _agree(expected: Tensor, found: Tensor) -> bool:
    size = expected.abs().nan_to_num(0.0, 0.0).max().item()
    return torch.allclose(found, expected, rtol=_RTOL, atol=_ATOL * size, equal_nan=True)


def _counting(rule: Optimizer | PerParameter) -> frozenset[str]:
    params, grads = [torch.zeros(2)], [torch.zeros(2)]
    try:
        pair = rule if isinstance(rule, Optimizer) else rule.make(LeafMap.of({"example": params[0]}))
        state = pair.init(params)
        before = [(role, float(number)) for role, number in StateParts.of(state, params).numbers()]
        params, state = pair.update(params, Weighted(grads, torch.ones(())), state, 1.0)
        after = [float(number) for _, number in StateParts.of(state, params).numbers()]
    except Exception as error:
        raise IndivisibleStateError(f"its state has numbers, and it fails on an example ({error})") from None
    grown = {role: new - old for (role, old), new in zip(before, after, strict=True)}
    odd = next((role for role, growth in grown.items() if growth not in (0, 1)), None)
    if odd is not None:
        raise IndivisibleStateError(f"the number {odd!r} in its state changes with the updates and does not count them")
    return frozenset(role for role, growth in grown.items() if growth)
