"""Frozen params in an update: they stay frozen, whatever a transform makes of all params alike."""

from typing import Any

from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import is_trainable, like_marked
from functional_ds.base.weighted import Weighted

from .state import State

__all__ = ["marking"]


def marking(name: str, update: Any) -> Any:
    """The ``update`` of a transform, after which params that are not trained still are not.

    A function of all params, such as a clamp or a mean with older ones, makes plain tensors, and a plain float is trained. So
    new values of a frozen leaf get its mark. Whole numbers stay whole.

    Args:
        name: of the transform.
        update: its function of (inner, step, state, grads).
    """

    def marked(inner: Any, step: Any, state: State, grads: Weighted) -> tuple[State, dict[str, Tensor]]:
        still = {i: leaf for i, leaf in enumerate(tree.leaves(state.params)) if _is_frozen(leaf)}
        found = update(inner, step, state, grads)
        if not still or not isinstance(found, tuple) or not isinstance(found[0], State):
            return found  # type: ignore[no-any-return]
        after, metrics = found
        leaves, spec = tree.flatten(after.params)
        changed = [i for i, leaf in still.items() if i < len(leaves) and leaves[i] is not leaf]
        for i in changed:
            _check_form(name, after, i, still[i], leaves[i])
            leaves[i] = like_marked(leaves[i], still[i])
        return (tree.replace(after, params=tree.unflatten(spec, leaves)) if changed else after), metrics

    return marked


def _is_frozen(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not is_trainable(leaf)


def _check_form(name: str, after: State, place: int, old: Tensor, new: Any) -> None:
    if isinstance(new, Tensor) and (new.dtype, new.shape) == (old.dtype, old.shape):
        return
    path, _ = tree.named(after.params)[place]
    shown = f"{new.dtype} of shape {list(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
    raise ValueError(
        f"{name}: its update makes {shown} of state.params {path!r}, which is not trained and was {old.dtype} of shape "
        f"{list(old.shape)}; leave out leaves that are not trained, or cast the new value with .to(leaf.dtype)"
    )
