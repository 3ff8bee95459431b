"""Finds reads of experts that bypass the token exchange."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from functional_ds import comm


def read_alone(
    roots: Sequence[Tensor], ep: comm.Group, path_of: Callable[[Any, int], str | None], matches: Callable[[str], bool]
) -> str | None:
    """The path of an expert leaf that a gradient reaches without a collective over ``ep``; None if there is none.

    Args:
        roots: where the backward pass begins.
        ep: the ranks that experts are split over.
        path_of: the path of the leaf that is an output of a node of the graph; None if it is not a leaf.
        matches: whether a path is that of experts.
    """
    todo: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        group = getattr(node, "group", None)
        if isinstance(group, comm.Group) and set(ep.ranks) <= set(group.ranks):
            continue
        for next_node, output in node.next_functions:
            if next_node is None:
                continue
            path = path_of(next_node, output)
            if path is not None and matches(path):
                return path
            if next_node not in seen:
                seen.add(next_node)
                todo.append(next_node)
    return None
