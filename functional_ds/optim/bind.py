"""An optimizer together with the tensors that it gets, and the trial that refuses one that these tensors would make wrong."""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap

from .optimizer import Optimizer, PerParameter

__all__ = ["BoundOptimizer", "Trial", "bound", "tried"]

_SCALES = (1e4, 0.1, 1.0)  # of the trial's gradients, an update each: a clip by norm acts on the first, and shows in the others
_CUT = 7  # where the trial's 17 elements are cut, within the first leaf
_RTOL, _ATOL = 1e-3, 1e-5  # of the largest distance that an element moves; the trial computes in fp64


@attrs.frozen
class Trial:
    """Whether an optimizer moved the leaves of a small example otherwise than all of them as they are.

    Attributes:
        joined: whether it moves them alike when they are joined in one flat tensor.
        alone: each by itself.
        cut: when the flat tensor is cut into two.
    """

    joined: bool = True
    alone: bool = True
    cut: bool = True


_ELEMENTWISE = Trial()


@attrs.define(eq=False)
class BoundOptimizer:
    """The optimizer for the tensors at hand: tried once, and made only once for each way in which the leaves lie."""

    rule: Optimizer | PerParameter
    _trial: Trial | None = None
    _last: tuple[LeafMap, Optimizer] | None = None

    def at(self, leaf_map: Callable[[], LeafMap]) -> Optimizer:
        """The optimizer for tensors in which the leaves lie as ``leaf_map()`` says, which is called only if it matters.

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

    def __str__(self) -> str:
        return str(self.rule)


def bound(rule: Optimizer | PerParameter, leaf_map: LeafMap) -> Optimizer:
    """The optimizer for tensors in which the leaves lie as ``leaf_map`` says; ``BoundOptimizer`` for a single use."""
    return BoundOptimizer(rule).at(lambda: leaf_map)


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
    """What of these tensors the optimizer is wrong for."""
    if not trial.cut and any(leaf.slices > 1 for leaf in leaf_map.leaves):
        return "slices of leaves"
    if not trial.cut and leaf_map.group is not None and leaf_map.group.size > 1:
        return "shards of flat tensors"
    if not trial.joined and leaf_map.flat:
        return "flat tensors of several leaves"
    if not trial.alone and leaf_map.partial:
        return "one leaf at a time"
    return None


def tried(rule: Optimizer) -> Trial:
    """Three updates of a matrix and a vector: as they are, joined in a flat tensor, each alone, and cut into two shards.

    A difference is a proof, so an elementwise optimizer is never refused. Agreement is none: the trial cannot see what shows
    only for other shapes, other gradients or later updates. It says nothing about an optimizer that fails on the example,
    draws at random, communicates, or gives different results for equal arguments; those are taken for elementwise.
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
