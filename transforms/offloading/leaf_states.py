"""Splits a state into what belongs to each stored leaf, and joins it again.

An optimizer's state, or a slot such as masters, can be split if it consists of lists with an entry for each leaf. What is in no
list (a step count, a loss scale) is shared by all leaves.
"""

from collections.abc import Collection, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.device import is_pinned, overlaps
from functional_ds.base.tree import NAMESPACE
from functional_ds.step.state.state import State

from .handles import is_handle


def on_device(values: Any, device: torch.device) -> Any:
    """The tree with every tensor on the device. The host waits for copies to it, not for scalars to reach the device."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, non_blocking=not leaf.dim() and overlaps(device) and not is_pinned(leaf))

    return tree.map(moved, values)


def flat(tree_: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves, including handles, and the structure."""
    return optree.tree_flatten(tree_, is_leaf=is_handle, namespace=NAMESPACE)


def beside_params(state: State, slots: Collection[str]) -> dict[str, Any]:
    """The optimizer's state and the slots of these names."""
    return {"optimizer": state.optimizer, "slots": {name: state.slots[name] for name in sorted(slots)}}


def content(state: State, slots: Collection[str]) -> dict[str, Any]:
    """A state's params, flattened first, its optimizer state and these slots."""
    return {"params": state.params, "rest": beside_params(state, slots)}


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def _skeleton(rest: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The outermost lists, and what is in none, as leaves."""
    return optree.tree_flatten(rest, is_leaf=lambda node: _is_list(node) or is_handle(node), namespace=NAMESPACE)


def list_lengths(rest: Any) -> tuple[int | None, ...]:
    """The lengths of the outermost lists, None for what is in none."""
    return tuple(len(node) if _is_list(node) else None for node in _skeleton(rest)[0])


def shared(rest: Any) -> list[Any]:
    """What is in no list."""
    return [node for node in _skeleton(rest)[0] if not _is_list(node)]


def without_leaves(rest: Any) -> Any:
    """What is in no list, with empty lists."""
    return parted(rest, [[None if count is None else 0 for count in list_lengths(rest)]])[0]


def joined(rests: Sequence[Any], like: Any) -> Any:
    """Concatenates the lists of the states of single leaves; takes what is in no list from ``like``.

    Raises:
        ValueError: their structures differ.
    """
    flats = [_skeleton(rest) for rest in rests]
    model, spec = _skeleton(like)
    odd = next((other for _, other in flats if other != spec), None)
    if odd is not None:
        raise ValueError(f"the states of two leaves differ in structure: {spec} and {odd}")
    nodes = [
        [x for skeleton, _ in flats for x in skeleton[place]] if _is_list(node) else node for place, node in enumerate(model)
    ]
    return tree.unflatten(spec, nodes)


def parted(rest: Any, rows: Sequence[Sequence[int | None]]) -> list[Any]:
    """The inverse of ``joined``: ``rows`` are the ``list_lengths`` of each leaf's state."""
    skeleton, spec = _skeleton(rest)
    at = [0] * len(skeleton)
    result = []
    for row in rows:
        nodes = [node if count is None else node[i : i + count] for node, count, i in zip(skeleton, row, at, strict=True)]
        at = [i + (count or 0) for i, count in zip(at, row, strict=True)]
        result.append(tree.unflatten(spec, nodes))
    return result


def assembled(
    base: State,
    first: State,
    contents: Sequence[Any],
    *,
    params: optree.PyTreeSpec,
    slots: Collection[str],
    device: torch.device,
) -> State:
    """The state of all leaves: ``base`` with their contents, and with the step and the shared values of ``first``.

    ``params`` is the structure of the params, ``slots`` names the slots that were split, ``device`` gets what is shared.
    """
    rest = joined(
        [leaf_state["rest"] for leaf_state in contents], on_device(without_leaves(beside_params(first, slots)), device)
    )
    return tree.replace(
        base,
        params=tree.unflatten(params, [leaf_state["params"][0] for leaf_state in contents]),
        optimizer=rest["optimizer"],
        step=on_device(first.step, device),
        slots={**base.slots, **rest["slots"]},
    )
