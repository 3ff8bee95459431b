"""Tests an optimizer on an example: whether it is elementwise, and which numbers of its state count updates."""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_selection import IndivisibleStateError, StateParts

from .optimizer import Optimizer, PerParameter

_SCALES = (
    1e4,
    0.1,
    1.0,
)  # of the gradients of the trial's three updates; a large one triggers clipping by norm, small ones show it
_CUT = 7  # where the trial's 17 elements are split, within the first leaf
_RTOL, _ATOL = 1e-3, 1e-5  # _ATOL is relative to the largest change of an element; the trial computes in fp64


@attrs.frozen
class Trial:
    """The result of a trial: the forms in which an optimizer updates two leaves as it does in their own shapes.

    Attributes:
        joined: as one flat tensor of both leaves.
        alone: each leaf in a separate call.
        cut: as two shards of the flat tensor, each in a separate call.
    """

    joined: bool = True
    alone: bool = True
    cut: bool = True


ELEMENTWISE = Trial()


def unfit_form(leaf_map: LeafMap, trial: Trial) -> str | None:
    """The form of these tensors for which the trial has shown the optimizer to be wrong; None if there is none."""
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
    """Compares three updates of a matrix and a vector in each form of ``Trial``, on the CPU in fp64.

    A difference proves that the optimizer is not elementwise; agreement proves nothing, as other shapes, gradients or later
    updates may differ. An optimizer that fails on the example, draws random numbers, communicates, or is not deterministic
    counts as elementwise.
    """
    if rule.elementwise:
        return ELEMENTWISE
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
                return ELEMENTWISE
            return Trial(*(_agree(whole, moved) for moved in (joined, torch.cat([matrix, vector], 1), torch.cat(shards, 1))))
    except Exception:  # the example does not suit this optimizer
        return ELEMENTWISE


def _as_flat(flat: Tensor) -> list[Tensor]:
    return [flat]


def _as_leaves(flat: Tensor) -> list[Tensor]:
    return [flat[:12].view(3, 4), flat[12:]]


def _moved(rule: Optimizer, start: Tensor, grads: Sequence[Tensor], as_tensors: Callable[[Tensor], list[Tensor]]) -> Tensor:
    """The change of each element since the start after each update: [updates, elements]."""
    params, changes = [p.clone() for p in as_tensors(start)], []
    state = rule.init([p.clone() for p in params])
    for grad in grads:
        weighted = Weighted([g.clone() for g in as_tensors(grad)], torch.ones((), dtype=torch.float64))
        params, state = rule.update(params, weighted, state, 1.0)
        changes.append(torch.cat([p.detach().reshape(-1) for p in params]) - start)
    return torch.stack(changes)


def _agree(expected: Tensor, actual: Tensor) -> bool:
    size = expected.abs().nan_to_num(0.0, 0.0).max().item()
    return torch.allclose(actual, expected, rtol=_RTOL, atol=_ATOL * size, equal_nan=True)


def counting(rule: Optimizer | PerParameter) -> frozenset[str]:
    params, grads = [torch.zeros(2)], [torch.zeros(2)]
    try:
        pair = rule if isinstance(rule, Optimizer) else rule.make(LeafMap.of({"example": params[0]}))
        state = pair.init(params)
        before = [(role, float(number)) for role, number in StateParts.of(state, params).numbers()]
        with torch.no_grad():  # a differentiable step may be computed again, without this
            params, state = pair.update(params, Weighted(grads, torch.ones(())), state, 1.0)
        after = [float(number) for _, number in StateParts.of(state, params).numbers()]
    except Exception as error:
        raise IndivisibleStateError(f"its state has numbers, and it fails on an example ({error})") from None
    grown = {role: new - old for (role, old), new in zip(before, after, strict=True)}
    odd = next((role for role, growth in grown.items() if growth not in (0, 1)), None)
    if odd is not None:
        raise IndivisibleStateError(f"the number {odd!r} in its state changes with the updates and does not count them")
    return frozenset(role for role, growth in grown.items() if growth)
