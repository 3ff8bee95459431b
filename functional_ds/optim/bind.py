"""An optimizer together with the tensors that it gets, and the trial that refuses one that these tensors would make wrong."""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap

from .optimizer import Optimizer, PerParameter

__all__ = ["BoundOptimizer", "bound"]

_SCALES = (1e4, 0.1, 1.0)  # of the trial's gradients, an update each: a clip by norm acts on the first, and shows in the others
_CUT = 7  # where the trial's 17 elements are cut, within the first leaf
_RTOL, _ATOL = 1e-3, 1e-5  # of the largest distance that an element moves; the trial computes in fp64


@attrs.define(eq=False)
class BoundOptimizer:
    """The optimizer for the tensors at hand: made, and tried, only once for each way in which the leaves lie."""

    rule: Optimizer | PerParameter
    _last: tuple[LeafMap | None, Optimizer] | None = None

    def at(self, leaf_map: Callable[[], LeafMap]) -> Optimizer:
        """The optimizer for tensors in which the leaves lie as ``leaf_map()`` says, which is called only if it matters."""
        found = leaf_map() if isinstance(self.rule, PerParameter) else None
        if self._last is None or self._last[0] != found:
            self._last = (found, bound(self.rule, leaf_map if found is None else lambda: found))
        return self._last[1]

    def __str__(self) -> str:
        return str(self.rule)


def bound(rule: Optimizer | PerParameter, leaf_map: Callable[[], LeafMap]) -> Optimizer:
    """The optimizer for tensors in which the leaves lie as ``leaf_map()`` says.

    Raises:
        ValueError: the optimizer is not elementwise, as the trial shows, and the tensors are not the leaves as the user has
            them: flat tensors of several leaves, shards, or slices of tensor parallelism.
    """
    if isinstance(rule, PerParameter):
        return rule.make(leaf_map())
    known = _ELEMENTWISE if rule.elementwise else _tried(rule)
    if known != _ELEMENTWISE:
        found = leaf_map()
        sliced = any(leaf.slices > 1 for leaf in found.leaves)
        cut = sliced or (found.group is not None and found.group.size > 1)
        if (cut and not known.cuts) or (found.flat and not known.joins):
            how = "slices of leaves" if sliced else "shards of flat tensors" if cut else "flat tensors of several leaves"
            raise ValueError(
                f"optimizer: {rule} is not elementwise: in a trial it moved a {'piece' if cut else 'flat copy'} of the params "
                f"otherwise than the whole. Here it gets {how}, so its result would be wrong. Clip with T.clip; write a rule "
                "for whole matrices with fds.per_matrix, and any other that needs leaves as fds.PerParameter"
            )
    return rule


@attrs.frozen
class _Trial:
    """Whether an optimizer moves leaves alike when they are joined in one flat tensor, and when that is cut into pieces."""

    joins: bool
    cuts: bool


_ELEMENTWISE = _Trial(joins=True, cuts=True)


def _tried(rule: Optimizer) -> _Trial:
    """Three updates of a matrix and a vector as they are, joined in a flat tensor, and cut into two shards.

    A difference is a proof, so an elementwise optimizer is never refused. Agreement is none: the trial cannot see what shows
    only for other shapes, other gradients or later updates. It says nothing about an optimizer that fails on the example,
    draws at random, communicates, or gives different results for equal arguments; those are taken for elementwise.
    """
    generator = torch.Generator().manual_seed(0)
    params, *grads = (torch.randn(17, generator=generator, dtype=torch.float64) for _ in range(1 + len(_SCALES)))
    grads = [grad * scale for grad, scale in zip(grads, _SCALES, strict=True)]
    try:
        with torch.random.fork_rng(devices=[]), comm.ledger() as book:
            whole, again = (_moved(rule, params, grads, _as_leaves) for _ in range(2))
            joined = _moved(rule, params, grads, lambda flat: [flat])
            ends = (slice(None, _CUT), slice(_CUT, None))
            cut = torch.cat([_moved(rule, params[end], [g[end] for g in grads], lambda flat: [flat]) for end in ends], 1)
            if book.rows or not torch.equal(whole, again):
                return _ELEMENTWISE
            return _Trial(_agree(whole, joined), _agree(whole, cut))
    except Exception:  # the example does not suit this optimizer
        return _ELEMENTWISE


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
