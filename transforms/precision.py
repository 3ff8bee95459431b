"""Mixed precision: fp32 masters, half-precision everything else."""

from typing import Any

import torch
from torch import Tensor

from functional_ds import tree
from functional_ds.state import State
from functional_ds.step import Metrics, Step, Transform, wrap
from functional_ds.trainable import is_trainable, like_marked
from functional_ds.weighted import Weighted

__all__ = ["mixed_precision"]

_COMPUTE = {"bf16": torch.bfloat16}


def mixed_precision(policy: str = "bf16") -> Transform:
    """Computes in bf16 and updates fp32 masters.

    The stored params are bf16, so the loss, the gathers and the gradients are; the fp32 masters lie beside the optimizer's
    state, in whatever shards that has. With Adam's two moments that makes 2 + 2 + 12 bytes a parameter for params, gradients
    and optimizer (law 20). Floating leaves of a batch are cast too; a loss comes back in fp32. ``step.params`` gives the
    masters.

    Put it before ``zero``: what is stored, then what is gathered. Integer and complex leaves stay as they are, and so does
    a frozen leaf that is bf16 already.

    Raises:
        ValueError: an unknown policy.
    """
    if policy not in _COMPUTE:
        raise ValueError(f"policy={policy!r} is unknown; use one of {', '.join(map(repr, _COMPUTE))}")
    compute = _COMPUTE[policy]

    def widen(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point() or not (is_trainable(leaf) or leaf.dtype != compute):
            return leaf
        return like_marked(leaf.detach().to(torch.promote_types(leaf.dtype, torch.float32)), leaf)

    def cast(leaf: Any) -> Any:
        smooth = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return like_marked(leaf.detach().to(compute), leaf) if smooth else leaf

    def init(inner: Any, step: Step, params: Any) -> State:
        state: State = inner(step, tree.map(widen, params))
        masters = [x if x.is_floating_point() and x.dtype != compute else None for x in tree.leaves(state.params)]
        return tree.replace(state, params=tree.map(cast, state.params)).put(masters=masters)

    def with_masters(state: State) -> State:
        """The state with every master in the place of its half-precision copy."""
        leaves, spec = tree.flatten(state.params)
        masters = zip(state.slots["masters"], leaves, strict=True)
        return tree.replace(state, params=tree.unflatten(spec, [leaf if wide is None else wide for wide, leaf in masters]))

    def loss(inner: Any, step: Step, state: State, params: Any, batch: Any) -> tuple[Weighted, dict[str, Weighted]]:
        return tree.map(Tensor.float, inner(step, state, params, tree.map(cast, batch)))  # type: ignore[no-any-return]

    def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        halves, spec = tree.flatten(state.params)
        masters = state.slots["masters"]
        state, metrics = inner(step, with_masters(state), grads)
        moved = tree.leaves(state.params)
        kept = [None if old is None else new for old, new in zip(masters, moved, strict=True)]
        stored = [new if wide is None else _write(half, wide) for half, wide, new in zip(halves, kept, moved, strict=True)]
        return tree.replace(state, params=tree.unflatten(spec, stored)).put(masters=kept), metrics

    def params(inner: Any, step: Step, state: State) -> Any:
        return inner(step, with_masters(state))

    return wrap(f"mixed_precision({policy!r})", init=init, loss=loss, update=update, params=params)


def _write(half: Tensor, wide: Tensor) -> Tensor:
    """Rounds a master into its half-precision copy, which the update owns."""
    with torch.no_grad():
        return half.copy_(wide)
