"""Updates that a loss scale skips, and marks of frozen params, handled for transforms."""

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import is_trainable, like_marked
from functional_ds.base.weighted import Weighted

from .state import State


def keeping(name: str, slot: str | None, update: Any) -> Any:
    """The ``update`` of a transform that does not handle skipped steps: in one it changes only what ``inner`` does.

    The host does not wait for the device: ``state.skip`` selects between the values before and after. So the values after must
    be new tensors.

    Cost: one pass over the tensors that the transform replaces; nothing in steps without a loss scale.

    Args:
        name: of the transform.
        slot: its slot.
        update: its function of (inner, step, state, grads).
    """

    def kept(inner: Any, step: Any, state: State, grads: Weighted) -> tuple[State, dict[str, Tensor]]:
        if state.skip is None:
            return update(inner, step, state, grads)  # type: ignore[no-any-return]
        held = [_Fallback.of(state)]

        def moved(step: Any, given: State, grads: Weighted) -> tuple[State, dict[str, Tensor]]:
            given = held.pop().unless_skipped(given, name)  # no longer held while the inner update frees memory
            after, metrics = inner(step, given, grads)
            held.append(_Fallback.of(after))
            return after, metrics

        after, metrics = update(moved, step, state, grads)
        after = held.pop().unless_skipped(after, name)
        return kept_slots(state, after, [slot]), metrics

    return kept


def kept_slots(before: State, after: State, slots: Iterable[str | None]) -> State:
    """``after``, with the earlier values of these slots if the step is skipped."""
    skip = after.skip
    changed = [slot for slot in slots if slot in after.slots and after.slots[slot] is not before.slots[slot]]
    if skip is None or not changed:
        return after
    return after.put(**{slot: _chosen(skip, before.slots[slot], after.slots[slot]) for slot in changed})


@attrs.frozen(eq=False)
class _Fallback:
    """A state to which a skipped step returns."""

    state: State
    versions: list[int]

    @staticmethod
    def of(state: State) -> "_Fallback":
        return _Fallback(state, _versions(tree.leaves(state)))

    def unless_skipped(self, after: State, name: str) -> State:
        """``after``, or this state if the step is skipped.

        Raises:
            ValueError: a tensor of this state was written in place.
        """
        leaves = tree.leaves(self.state)
        written = [i for i, (old, new) in enumerate(zip(self.versions, _versions(leaves), strict=True)) if old != new]
        if written:
            path = tree.named(self.state)[written[0]][0]
            raise ValueError(
                f"{name}: its update writes state.{path} in place, and a step that the loss scale skips must leave it as it "
                "was: put a new tensor into the state, or change nothing where state.skip is true and declare it: "
                "wrap(..., traits=[Trait.HEEDS_SKIPS])"
            )
        if after is self.state or after.skip is None:
            return after
        return _chosen(after.skip, self.state, after)  # type: ignore[no-any-return]


def _versions(leaves: Iterable[Any]) -> list[int]:
    return [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]


def _chosen(skip: Tensor, old: Any, new: Any) -> Any:
    """``old`` if a step is skipped, else ``new``; decided on the host only if they differ in shape or type."""
    (olds, spec), (news, other) = tree.flatten(old), tree.flatten(new)
    if spec != other or not all(map(_alike, olds, news)):
        return new if skip.is_meta or not bool(skip) else old
    return tree.unflatten(other, [a if a is b else _where(skip, a, b) for a, b in zip(olds, news, strict=True)])


def _alike(old: Any, new: Any) -> bool:
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return old is new
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)


def _where(skip: Tensor, old: Tensor, new: Tensor) -> Tensor:
    return like_marked(torch.where(skip.to(new.device), old.detach(), new.detach()), new)


def marking(name: str, update: Any) -> Any:
    """The ``update`` of a transform that keeps frozen params marked as frozen.

    A function of all params, such as a clamp or an average, makes plain tensors, and a plain float tensor is trained. So new
    values of a frozen leaf get its mark. Integers stay integers.

    Args:
        name: of the transform.
        update: its function of (inner, step, state, grads).
    """

    def marked(inner: Any, step: Any, state: State, grads: Weighted) -> tuple[State, dict[str, Tensor]]:
        still = {i: leaf for i, leaf in enumerate(tree.leaves(state.params)) if _is_frozen(leaf)}
        result = update(inner, step, state, grads)
        if not still or not isinstance(result, tuple) or not isinstance(result[0], State):
            return result  # type: ignore[no-any-return]
        after, metrics = result
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
