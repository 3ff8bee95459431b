"""Selects leaves in an optimizer's tensors: views of params, gradients and states, and writing them back."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import optree
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.byte_ranges import begin_together
from functional_ds.base.tree import NAMESPACE

from .leaf_map import LeafMap, TensorRange


class IndivisibleStateError(ValueError):
    """An optimizer's state cannot be split by leaves."""


@attrs.frozen(eq=False)
class Unused:
    """The trained leaves that no rank's loss has used.

    Attributes:
        paths: those of this step.
        idle: how many earlier updates skipped a leaf, by path; 0 for other leaves.
    """

    paths: frozenset[str]
    idle: Mapping[str, int]


@attrs.frozen(eq=False)
class LeafSelection:
    """Selected leaves of a leaf map.

    Attributes:
        extents: their ranges in this rank's tensors; None if each tensor is a leaf, which keeps its shape.
        tensors: the indices of their tensors, one for each view.
        leaf_map: the leaf map of the views.
    """

    extents: tuple[TensorRange, ...] | None
    tensors: tuple[int, ...]
    leaf_map: LeafMap

    @staticmethod
    def of(leaf_map: LeafMap, leaves: Collection[int]) -> "LeafSelection":
        """The leaves with these indices."""
        extents, inner = leaf_map.select(leaves)
        if leaf_map.flat:
            return LeafSelection(extents, tuple(extent.tensor for extent in extents), inner)
        kept = set(leaves)
        tensors = tuple(shard.tensor for shard in leaf_map.shards if shard.leaf in kept)
        number = {leaf: place for place, leaf in enumerate(sorted(kept))}
        ranks = [[shard for shard in shards if shard.leaf in kept] for shards in leaf_map.shards_by_rank]
        renumbered = (
            tuple(attrs.evolve(shard, leaf=number[shard.leaf], tensor=place) for place, shard in enumerate(shards))
            for shards in ranks
        )
        return LeafSelection(None, tensors, attrs.evolve(inner, shards_by_rank=tuple(renumbered), flat=False))

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of the leaves in a list of tensors with the params' layout."""
        if self.extents is None:
            return [tensors[place] for place in self.tensors]
        return [tensors[extent.tensor][extent.start : extent.stop] for extent in self.extents]

    def put(self, tensors: list[Tensor], views: Sequence[Tensor], moved: Sequence[Tensor]) -> None:
        """Writes the new values of the views to the tensors; replaces tensors that are new as a whole."""
        for place, view, new in zip(self.tensors, views, moved, strict=True):
            if self.extents is None:
                tensors[place] = new
            elif not begin_together(new, view):
                if view.shape == tensors[place].shape:
                    tensors[place] = new  # derivatives may need the old one
                else:
                    view.copy_(new)


@attrs.define(eq=False)
class StateParts:
    """An optimizer's state as lists with a tensor or number for each param, and single numbers.

    Attributes:
        nodes: the lists and the single numbers.
        roles: the path of each, without list indices.
        spec: the structure of the state.
        params: the params.
    """

    nodes: list[Any]
    roles: tuple[str, ...]
    spec: optree.PyTreeSpec
    params: Sequence[Tensor]

    @staticmethod
    def of(state: Any, params: Sequence[Tensor]) -> "StateParts":
        """The parts of the state of an optimizer of these params.

        Raises:
            IndivisibleStateError: the state contains something else.
        """

        def is_list(node: Any) -> bool:
            return type(node) in (list, tuple) and len(node) == len(params) and all(map(_belongs, node, params))

        paths, nodes, spec = optree.tree_flatten_with_path(state, is_leaf=is_list, namespace=NAMESPACE)
        roles = tuple(".".join(str(part) for part in path if not str(part).isdecimal()) for path in paths)
        for role, node in zip(roles, nodes, strict=True):
            if not is_list(node) and not _is_number(node):
                shown = f"a tensor of shape {list(node.shape)}" if isinstance(node, Tensor) else type(node).__name__
                raise IndivisibleStateError(f"its state has {shown} in {role!r}, which belongs to no param alone")
        return StateParts([[*node] if is_list(node) else node for node in nodes], roles, spec, params)

    def numbers(self) -> list[tuple[str, Any]]:
        """The numbers, with their roles."""
        pairs = zip(self.roles, self.nodes, strict=True)
        flat = ((role, child) for role, node in pairs for child in (node if isinstance(node, list) else [node]))
        return [(role, child) for role, child in flat if _is_number(child)]

    def select(self, selection: LeafSelection, counts: Collection[str], idle: int) -> Any:
        """The state of the selected leaves: views of tensors, and numbers; ``idle`` is subtracted from those in ``counts``."""
        nodes: list[Any] = []
        for role, node in zip(self.roles, self.nodes, strict=True):
            if role in counts:
                nodes.append([node[i] - idle for i in selection.tensors] if isinstance(node, list) else node - idle)
            elif self._holds_numbers(node):
                nodes.append([node[i] for i in selection.tensors])
            else:
                nodes.append(selection.views(node) if isinstance(node, list) else node)
        return tree.unflatten(self.spec, nodes)

    def put(self, selection: LeafSelection, before: Any, after: Any, counts: Collection[str]) -> None:
        """Writes the new tensors in the state of the selected leaves to this one; numbers are unchanged."""
        views: list[Any] = self.spec.flatten_up_to(before)
        moved: list[Any] = self.spec.flatten_up_to(after)
        for role, node, old, new in zip(self.roles, self.nodes, views, moved, strict=True):
            if isinstance(node, list) and role not in counts and not self._holds_numbers(node):
                selection.put(node, old, new)

    def joined(self, counts: Collection[str], step: Any) -> Any:
        """The whole state; ``step`` is added to the numbers whose roles are in ``counts``."""
        nodes = [
            node if role not in counts else [one + step for one in node] if isinstance(node, list) else node + step
            for role, node in zip(self.roles, self.nodes, strict=True)
        ]
        return tree.unflatten(self.spec, nodes)

    def _holds_numbers(self, node: Any) -> bool:
        return isinstance(node, list) and any(
            not child.dim() and param.dim() for child, param in zip(node, self.params, strict=True)
        )


def _belongs(child: Any, param: Tensor) -> bool:
    """Whether it is a number, or has a value, or a pair of values, for each element of the param."""
    return isinstance(child, Tensor) and (not child.dim() or child.shape in (param.shape, (*param.shape, 2)))


def _is_number(node: Any) -> bool:
    return not node.dim() if isinstance(node, Tensor) else type(node) in (int, float)
